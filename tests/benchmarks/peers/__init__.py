"""Other tools that keep versions of data, on the same boundaries in one run: what each is good at."""
