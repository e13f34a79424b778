"""What is on disk: digests, canonical encodings, and the values they carry."""
