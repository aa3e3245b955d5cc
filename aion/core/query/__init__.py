"""A query: what follows from what the user wrote. Pure.

    plan          a call checked against a schema, for child, root and LocalOperator
    columns       the columns of a query and of its result; pane_columns: what those mean
    functions     functions of the user's; deciding: columns and predicates that begin and end windows
    updates       events that replace earlier ones
    evolution     definitions that change between two starts; history: what is stored of them; evolved: the plan then
    sink_notes    what a checkpoint knows of tables
    words         a definition in its user's words

Called by: everything above it.
Must never know: a shard, and what is in it.
"""
