"""One function per command: the library behind the command line.

Each takes one frozen config and returns plain results; nothing here prints."""
