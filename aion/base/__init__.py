"""What all of aion stands on: numbers and their limits, time, the types of columns, and hashes of rows. Pure."""
