"""`torchrun train.py +recipe=fp4` from a checkout."""

from lowprec_train.main import main

if __name__ == "__main__":
    main()
