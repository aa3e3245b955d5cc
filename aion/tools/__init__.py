"""What a user runs beside a query.

    explain       what the last batches of a query did, and why
    diff          what another definition would do with the state
    top           live metrics of this host
    inspect       what is in a state folder
    tune          which policy suits a recorded query

Called by: aion.cli.
Must never know: Spark.
"""
