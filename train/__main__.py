"""``python -m train``: the ``lightning`` command under a name that no other package uses."""

from train.cli import run_lightning

if __name__ == "__main__":
    run_lightning()
