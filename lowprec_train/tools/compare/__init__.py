"""`lowprec compare`: runs on the same data, their loss gaps, speed and memory, as a table, a figure and a page."""
