import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.FileWriter;
import java.io.IOException;
import java.io.PrintWriter;
import java.io.Serializable;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.TreeMap;
import java.util.stream.Collectors;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.streaming.api.functions.source.legacy.SourceFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.operators.AbstractStreamOperator;
import org.apache.flink.streaming.api.operators.OneInputStreamOperator;
import org.apache.flink.streaming.api.watermark.Watermark;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.triggers.Trigger;
import org.apache.flink.streaming.api.windowing.triggers.TriggerResult;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;
import org.apache.flink.util.Collector;

/**
 * The workload "average" with events kept by Flink: a window runs at its end, and at its end plus the allowed lateness.
 *
 * <p>Arguments: state backend (hashmap, rocksdb), folder of the cell, folder of the events, batches, first instant in
 * milliseconds, window in milliseconds, past windows, bytes of a payload, managed memory in bytes, "real" or "max".
 *
 * <p>Each batch of events is a file; after it, the watermark moves by a window. Writes the files that a cell of Spark
 * writes (batches.jsonl, progress.jsonl, samples.jsonl), and panes.csv.
 */
public class FlinkAverage {
  static Plan plan;
  static volatile double[] begun;

  public static class Event {
    public long ts;
    public long counter;
    public long value;
    public byte[] pad;

    public Event() {}
  }

  public static class Pane {
    public long start;
    public boolean last;
    public long events;
    public double mean;
    public double seconds;

    public Pane() {}
  }

  static class Plan implements Serializable {
    String folder, events, pace;
    int batches, payload;
    long first, window, lateness;
  }

  static double now() {
    return System.currentTimeMillis() / 1e3;
  }

  static void append(String name, String line) {
    try (PrintWriter out = new PrintWriter(new FileWriter(plan.folder + "/" + name, true))) {
      out.println(line);
    } catch (IOException error) {
      throw new RuntimeException(error);
    }
  }

  /** The events of a batch, then a watermark; at the end one that ends the lateness of every window. */
  static class Batches implements SourceFunction<Event> {
    volatile boolean cancelled;

    @Override
    public void run(SourceContext<Event> context) throws Exception {
      long origin = System.currentTimeMillis();
      for (int batch = 0; batch < plan.batches && !cancelled; batch++) {
        if (plan.pace.equals("real")) Thread.sleep(Math.max(0, origin + batch * plan.window - System.currentTimeMillis()));
        begun[batch] = now();
        Path file = Path.of(plan.events, String.format("batch-%05d.bin", batch));
        try (DataInputStream in = new DataInputStream(new BufferedInputStream(Files.newInputStream(file), 1 << 20))) {
          int count = in.readInt();
          for (int i = 0; i < count && !cancelled; i++) {
            Event event = new Event();
            event.ts = in.readLong();
            event.counter = in.readLong();
            event.value = in.readLong();
            event.pad = new byte[plan.payload];
            in.readFully(event.pad);
            context.collectWithTimestamp(event, Math.floorDiv(event.ts, 1000L));
          }
        }
        context.emitWatermark(new Watermark(plan.first + (batch + 1) * plan.window - 1));
      }
      context.emitWatermark(new Watermark(plan.first + plan.batches * plan.window + plan.lateness + 2 * plan.window));
    }

    @Override
    public void cancel() {
      cancelled = true;
    }
  }

  static class AtEndAndAtLast extends Trigger<Event, TimeWindow> {
    final long lateness;

    AtEndAndAtLast(long lateness) {
      this.lateness = lateness;
    }

    @Override
    public TriggerResult onElement(Event event, long ts, TimeWindow window, TriggerContext context) {
      if (window.maxTimestamp() > context.getCurrentWatermark()) context.registerEventTimeTimer(window.maxTimestamp());
      context.registerEventTimeTimer(window.maxTimestamp() + lateness);
      return TriggerResult.CONTINUE;
    }

    @Override
    public TriggerResult onProcessingTime(long ts, TimeWindow window, TriggerContext context) {
      return TriggerResult.CONTINUE;
    }

    @Override
    public TriggerResult onEventTime(long ts, TimeWindow window, TriggerContext context) {
      return TriggerResult.FIRE;
    }

    @Override
    public void clear(TimeWindow window, TriggerContext context) throws Exception {
      context.deleteEventTimeTimer(window.maxTimestamp());
      context.deleteEventTimeTimer(window.maxTimestamp() + lateness);
    }
  }

  static class Mean extends ProcessWindowFunction<Event, Pane, Integer, TimeWindow> {
    final long lateness;

    Mean(long lateness) {
      this.lateness = lateness;
    }

    @Override
    public void process(Integer key, Context context, Iterable<Event> events, Collector<Pane> out) {
      long began = System.nanoTime(), sum = 0, count = 0;
      for (Event event : events) {
        sum += event.value;
        count++;
      }
      Pane pane = new Pane();
      pane.start = context.window().getStart();
      pane.last = context.currentWatermark() >= context.window().maxTimestamp() + lateness;
      pane.events = count;
      pane.mean = (double) sum / count;
      pane.seconds = (System.nanoTime() - began) / 1e9;
      out.collect(pane);
    }
  }

  /** Writes a line for each batch when its watermark has passed all windows. */
  static class Log extends AbstractStreamOperator<Pane> implements OneInputStreamOperator<Pane, Pane> {
    transient List<Pane> panes;
    transient int batch;

    @Override
    public void open() throws Exception {
      super.open();
      panes = new ArrayList<>();
    }

    @Override
    public void processElement(StreamRecord<Pane> record) {
      panes.add(record.getValue());
    }

    @Override
    public void processWatermark(Watermark mark) throws Exception {
      double done = now();
      for (Pane pane : panes) {
        append("panes.csv", String.format(Locale.ROOT, "%d,%s,%d,%s", pane.start, kind(pane), pane.events, pane.mean));
      }
      String executions = panes.stream().map(pane -> String.format(Locale.ROOT,
          "{\"stage\": \"mean\", \"kind\": \"%s\", \"events\": %d, \"seconds\": %.6f}", kind(pane), pane.events, pane.seconds))
          .collect(Collectors.joining(", "));
      String kinds = panes.stream().collect(Collectors.groupingBy(Log::kind, TreeMap::new, Collectors.counting()))
          .entrySet().stream().map(e -> String.format("\"%s\": %d", e.getKey(), e.getValue()))
          .collect(Collectors.joining(", "));
      append("batches.jsonl", String.format(Locale.ROOT,
          "{\"batch\": %d, \"t\": %.3f, \"rows\": %d, \"executions\": [%s], \"panes\": {%s}}",
          batch, done, panes.size(), executions, kinds));
      if (batch < plan.batches) {
        append("progress.jsonl", String.format(Locale.ROOT,
            "{\"batch\": %d, \"t\": %.3f, \"rows\": 0, \"ms\": {\"triggerExecution\": %.0f}, \"dropped\": 0}",
            batch, begun[batch], (done - begun[batch]) * 1000));
      }
      panes.clear();
      batch++;
      super.processWatermark(mark);
    }

    static String kind(Pane pane) {
      return pane.last ? "final" : "on_time";
    }
  }

  static void sample() {
    try {
      while (true) {
        String gc = ManagementFactory.getGarbageCollectorMXBeans().stream()
            .map(bean -> String.format("\"%s\": [%d, %d]", bean.getName(), bean.getCollectionCount(), bean.getCollectionTime()))
            .collect(Collectors.joining(", "));
        long heap = ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed();
        append("samples.jsonl", String.format(Locale.ROOT, "{\"t\": %.3f, \"heap\": %d, \"gc\": {%s}}", now(), heap, gc));
        Thread.sleep(1000);
      }
    } catch (InterruptedException end) {
      Thread.currentThread().interrupt();
    }
  }

  public static void main(String[] args) throws Exception {
    plan = new Plan();
    plan.folder = args[1];
    plan.events = args[2];
    plan.batches = Integer.parseInt(args[3]);
    plan.first = Long.parseLong(args[4]);
    plan.window = Long.parseLong(args[5]);
    plan.lateness = plan.window * Integer.parseInt(args[6]);
    plan.payload = Integer.parseInt(args[7]);
    plan.pace = args[9];
    begun = new double[plan.batches];
    Thread sampler = new Thread(FlinkAverage::sample, "sampler");
    sampler.setDaemon(true);
    sampler.start();

    Configuration conf = FlinkSetup.configuration(args[0], args[8] + "b", "16m", plan.folder + "/work/checkpoints", "2 s");
    conf.setString("taskmanager.memory.network.min", "16m");
    // RocksDB gets a memtable for each state at a time, in steps of an eighth of its size. Half of the managed memory is
    // for memtables, and a window operator has three states, so the usual 64 MiB would be flushed all the time (Flink's
    // documentation, "Tuning RocksDB Memory").
    conf.setString("state.backend.rocksdb.writebuffer.size", Math.max(1 << 20, Long.parseLong(args[8]) / 8) + "b");
    conf.setString("state.backend.rocksdb.localdir", plan.folder + "/work/rocksdb");
    conf.setString("io.tmp.dirs", plan.folder + "/work/tmp");
    StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(1, conf);
    env.getConfig().enableObjectReuse();
    env.addSource(new Batches(), "batches", TypeInformation.of(Event.class))
        .keyBy(event -> 0)
        .window(TumblingEventTimeWindows.of(Duration.ofMillis(plan.window)))
        .allowedLateness(Duration.ofMillis(plan.lateness))
        .trigger(new AtEndAndAtLast(plan.lateness))
        .process(new Mean(plan.lateness))
        .transform("log", TypeInformation.of(Pane.class), new Log())
        .sinkTo(new DiscardingSink<>());
    env.execute();
    System.exit(0);
  }
}
