"""The command: parse, call, print. One file for each command."""
