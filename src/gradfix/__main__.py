"""`python -m gradfix` is the command line."""

from gradfix.cli import main

if __name__ == "__main__":
    main()
