"""Audio files, and the spectra that speech models read."""
