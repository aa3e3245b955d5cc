"""``aion demo``: real late flights, streamed through Spark and compared with a computation over all of them."""
