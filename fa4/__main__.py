"""python -m fa4"""

from .cli.main import main

if __name__ == "__main__":
    main(prog_name="fa4")
