"""``poprun``, and ``python -m poprun``: what asks a run to save does not end the launcher, which
hears it before it loads anything.
"""

import signal
import sys


def main() -> int:
    """What `launcher.main` does."""
    # for instances, which are not there yet; they would inherit that it is ignored
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    from poprun import launcher

    return launcher.main()


if __name__ == "__main__":
    sys.exit(main())
