"""Section 5 of the Aion paper on Spark: the cost of state in memory and speed when events come late."""
