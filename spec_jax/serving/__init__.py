"""An HTTP server that speaks the protocol of the OpenAI API, over `AsyncLLM`."""
