"""What the operating system is asked for: processes, threads, settings files, progress in bytes."""
