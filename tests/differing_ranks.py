"""train.py whose ranks have command lines of their own: differing_ranks.py OVERRIDE... [RANK:OVERRIDE...]."""

import os
import re
import sys

from lowprec_train.main import main

if __name__ == "__main__":
    own = re.compile(r"(\d+):(.*)")
    words = [(own.fullmatch(word), word) for word in sys.argv[1:]]
    sys.argv[1:] = [match[2] if match else word for match, word in words if not match or match[1] == os.environ["RANK"]]
    main()
