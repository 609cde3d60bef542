"""Device-side code shared by all chips and by forward and backward."""
