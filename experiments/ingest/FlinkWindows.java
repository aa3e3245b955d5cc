import java.time.Duration;
import java.util.SplittableRandom;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.CheckpointListener;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.SingleOutputStreamOperator;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.triggers.Trigger;
import org.apache.flink.streaming.api.windowing.triggers.TriggerResult;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;
import org.apache.flink.util.OutputTag;

/**
 * The stream of {@code experiments/generate.py} through Flink's tumbling windows, in one process.
 *
 * <p>Arguments, all numbers of events, bytes or milliseconds: state backend (hashmap, rocksdb), "kept" or "mean", parallelism,
 * events in all, events that are not measured, events of a batch, event time of a batch, window, keys, bytes of a payload,
 * share of late events in percent, windows that they are late at most, folder for checkpoints, time between two checkpoints.
 *
 * <p>Prints one line of JSON. Events are made in this process, so Flink reads no source: that is to its advantage.
 */
public class FlinkWindows {
  static final AtomicLong measuredFrom = new AtomicLong();
  static final AtomicLong measuredTo = new AtomicLong();
  static final AtomicLong made = new AtomicLong();
  static final AtomicLong computed = new AtomicLong();
  static final AtomicLong panes = new AtomicLong();
  static final AtomicLong checkpoints = new AtomicLong();
  static final OutputTag<Event> DROPPED = new OutputTag<Event>("dropped") {};

  public static class Event {
    public long key;
    public long ts;
    public double value;
    public byte[] payload;

    public Event() {}
  }

  /** The settings of a run, and the time of each event. */
  public static class Plan implements java.io.Serializable {
    int parallelism, keys, payload, lateShare, pastWindows;
    long events, skipped, batch, span, window, delay;

    /** Event time of the event at this place of the stream, in milliseconds, if it is not late. */
    long inTime(long at) {
      return 1_700_000_000_000L + window / 2 + (long) ((double) at / batch * span);
    }
  }

  /** Turns the numbers of a source into events. Each of the parallel instances makes every n-th event of the stream. */
  static class Make extends RichMapFunction<Long, Event> implements CheckpointListener {
    final Plan plan;
    transient SplittableRandom random;
    transient byte[] bytes;
    transient long count;
    transient int instance;

    Make(Plan plan) {
      this.plan = plan;
    }

    @Override
    public void open(OpenContext context) {
      instance = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
      random = new SplittableRandom(instance);
      bytes = new byte[(16 << 20) + plan.payload];
      random.nextBytes(bytes);
    }

    @Override
    public Event map(Long number) {
      if (count == plan.skipped / plan.parallelism) measuredFrom.accumulateAndGet(System.nanoTime(), Math::max);
      long now = plan.inTime(count * plan.parallelism + instance);
      Event event = new Event();
      event.key = random.nextInt(plan.keys);
      event.value = random.nextInt(1000);
      event.ts = random.nextInt(100) < plan.lateShare ? late(now) : now;
      if (plan.payload > 0) {
        // Bytes from memory, as Spark reads them from the page cache. No block of RocksDB holds one twice.
        event.payload = new byte[plan.payload];
        System.arraycopy(bytes, random.nextInt(16 << 20), event.payload, 0, plan.payload);
      }
      count++;
      made.incrementAndGet();
      measuredTo.accumulateAndGet(System.nanoTime(), Math::max);
      return event;
    }

    /** Anywhere in the i-th newest window that the watermark has ended; i as windows_late() of generate.py draws it. */
    long late(long now) {
      long ended = Math.floorDiv(now - plan.delay, plan.window) * plan.window;
      int windows;
      do {
        double u1 = 1 - random.nextDouble(), u2 = random.nextDouble();
        double normal = Math.sqrt(-2 * Math.log(u1)) * Math.cos(2 * Math.PI * u2);
        windows = (int) Math.round(Math.exp(normal)) - 1;
      } while (windows < 1 || windows > plan.pastWindows);
      return ended - windows * plan.window + random.nextLong(plan.window);
    }

    @Override
    public void notifyCheckpointComplete(long id) {
      if (instance == 0) checkpoints.incrementAndGet();
    }
  }

  /** A window's result when it ends, and again at most once for each batch of event time with late events. */
  static class AtEndAndAgain extends Trigger<Event, TimeWindow> {
    final long every;

    AtEndAndAgain(long every) {
      this.every = every;
    }

    @Override
    public TriggerResult onElement(Event event, long ts, TimeWindow window, TriggerContext context) {
      long now = context.getCurrentWatermark();
      boolean onTime = window.maxTimestamp() > now;
      context.registerEventTimeTimer(onTime ? window.maxTimestamp() : (now / every + 1) * every - 1);
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
    public void clear(TimeWindow window, TriggerContext context) {
      context.deleteEventTimeTimer(window.maxTimestamp());
    }
  }

  /** The mean of the events that the window keeps. */
  static class MeanOfEvents extends ProcessWindowFunction<Event, Double, Long, TimeWindow> {
    @Override
    public void process(Long key, Context context, Iterable<Event> events, Collector<Double> out) {
      double sum = 0;
      long count = 0;
      for (Event event : events) {
        sum += event.value;
        count++;
      }
      computed.addAndGet(count);
      panes.incrementAndGet();
      out.collect(sum / count);
    }
  }

  static class Mean implements AggregateFunction<Event, double[], Double> {
    @Override
    public double[] createAccumulator() {
      return new double[2];
    }

    @Override
    public double[] add(Event event, double[] sums) {
      sums[0] += event.value;
      sums[1]++;
      return sums;
    }

    @Override
    public Double getResult(double[] sums) {
      computed.addAndGet((long) sums[1]);
      panes.incrementAndGet();
      return sums[0] / sums[1];
    }

    @Override
    public double[] merge(double[] one, double[] other) {
      return new double[] {one[0] + other[0], one[1] + other[1]};
    }
  }

  public static void main(String[] args) throws Exception {
    Plan plan = new Plan();
    String backend = args[0], mode = args[1];
    plan.parallelism = Integer.parseInt(args[2]);
    plan.events = Long.parseLong(args[3]);
    plan.skipped = Long.parseLong(args[4]);
    plan.batch = Long.parseLong(args[5]);
    plan.span = Long.parseLong(args[6]);
    plan.window = plan.delay = Long.parseLong(args[7]);
    plan.keys = Integer.parseInt(args[8]);
    plan.payload = Integer.parseInt(args[9]);
    plan.lateShare = Integer.parseInt(args[10]);
    plan.pastWindows = Integer.parseInt(args[11]);

    Configuration conf = FlinkSetup.configuration(backend, "1g", "128m", args[12], args[13] + " ms");
    StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(plan.parallelism, conf);
    env.getConfig().enableObjectReuse();

    var windows =
        env.fromSequence(0, plan.events - 1)
            .map(new Make(plan))
            .returns(Event.class)
            .assignTimestampsAndWatermarks(
                WatermarkStrategy.<Event>forBoundedOutOfOrderness(Duration.ofMillis(plan.delay))
                    .withTimestampAssigner((event, ts) -> event.ts))
            .keyBy(event -> event.key)
            .window(TumblingEventTimeWindows.of(Duration.ofMillis(plan.window)))
            .allowedLateness(Duration.ofMillis(plan.window * (plan.pastWindows + 2)))
            .sideOutputLateData(DROPPED)
            .trigger(new AtEndAndAgain(plan.span));
    SingleOutputStreamOperator<Double> means =
        mode.equals("kept") ? windows.process(new MeanOfEvents()) : windows.aggregate(new Mean());
    means.sinkTo(new DiscardingSink<>());
    AtomicLong dropped = Dropped.count;
    means.getSideOutput(DROPPED).map(new Dropped()).sinkTo(new DiscardingSink<>());
    long begin = System.nanoTime();
    env.execute();
    System.out.printf(
        "{\"events\": %d, \"wall_s\": %.3f, \"measured_s\": %.3f, \"computed\": %d, \"panes\": %d, \"dropped\": %d, "
            + "\"checkpoints\": %d}%n",
        made.get(), (System.nanoTime() - begin) / 1e9, (measuredTo.get() - measuredFrom.get()) / 1e9, computed.get(),
        panes.get(), dropped.get(), checkpoints.get());
    System.exit(0);
  }

  static class Dropped extends RichMapFunction<Event, Long> {
    static final AtomicLong count = new AtomicLong();

    @Override
    public Long map(Event event) {
      return count.incrementAndGet();
    }
  }
}
