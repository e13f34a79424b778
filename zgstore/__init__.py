"""Git for a teacher's hidden states."""
