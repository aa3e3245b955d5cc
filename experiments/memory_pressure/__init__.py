"""Section 5 of the Aion paper on Spark: what state costs in memory and speed when events come late."""
