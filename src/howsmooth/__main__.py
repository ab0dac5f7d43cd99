"""`python -m howsmooth` is the command `howsmooth`."""

from howsmooth.cli import main

if __name__ == "__main__":
    main()
