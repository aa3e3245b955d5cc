"""When a late window is computed again (paper section 3.4): the triggers, and the planner of the best instants."""
