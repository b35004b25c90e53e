"""Token streams on disk and the order in which training reads them."""
