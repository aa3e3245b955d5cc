import org.apache.flink.configuration.Configuration;

/** What the programs for Flink have in common. */
final class FlinkSetup {
  private FlinkSetup() {}

  /**
   * State in {@code backend} (hashmap, rocksdb), with incremental checkpoints.
   *
   * @param managed memory for RocksDB, such as "1g"
   * @param network memory for exchanges between tasks
   * @param checkpoints folder
   * @param interval between two checkpoints, such as "2 s"
   */
  static Configuration configuration(String backend, String managed, String network, String checkpoints, String interval) {
    Configuration conf = new Configuration();
    conf.setString("state.backend.type", backend);
    // The default, since "most applications should not need" more (Flink's documentation, "State Backends", "Memory
    // Management"): RocksDB's memtables, indexes and cached blocks share the managed memory.
    conf.setString("state.backend.rocksdb.memory.managed", "true");
    conf.setString("taskmanager.memory.managed.size", managed);
    conf.setString("taskmanager.memory.network.max", network);
    conf.setString("execution.checkpointing.dir", "file://" + checkpoints);
    conf.setString("execution.checkpointing.interval", interval);
    conf.setString("execution.checkpointing.incremental", "true");
    return conf;
  }
}
