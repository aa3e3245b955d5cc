"""Which slice an event belongs to, which slices a window is made of, and how slices are combined (Scotty)."""
