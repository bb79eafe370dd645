"""`python -m meshscope` is the same as `meshscope`."""

from meshscope.cli import main

if __name__ == "__main__":
    main(prog_name="meshscope")
