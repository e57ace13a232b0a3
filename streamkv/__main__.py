"""`python -m streamkv`: the command line."""

from streamkv.cli import main

if __name__ == "__main__":
    main()
