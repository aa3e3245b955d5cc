"""The state server: one process for each executor host. It keeps shards in memory between two tasks.

    client        finds or starts the server, and asks it; remote_attempt: the work of a batch through it
    main          the process; verbs: what can be asked; requests: what is checked first; wire: the messages
    host          the shards of a host; shared: their budget, I/O thread and policies; attempts: who works on which
    schedule      when the next batch comes
    guard         policies of users, run so that they do no harm
    metrics       the table of metrics; endpoint: for Prometheus
    machine, heap, processes, watchdog, folders, server_folder, live_folder: the host itself

Called by: the workers of executors, and tools that look at a host.
Must never know: code of users, but for policies.
"""
