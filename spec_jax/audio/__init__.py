"""Sound: files, and the spectra that models of speech read."""
