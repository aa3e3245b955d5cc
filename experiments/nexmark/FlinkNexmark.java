import java.io.PrintWriter;
import java.io.Serializable;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Collectors;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.CheckpointListener;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.KeyedStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessAllWindowFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.watermark.Watermark;
import org.apache.flink.streaming.api.windowing.assigners.EventTimeSessionWindows;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingProcessingTimeWindows;
import org.apache.flink.streaming.api.windowing.triggers.Trigger;
import org.apache.flink.streaming.api.windowing.triggers.TriggerResult;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/**
 * Nexmark's queries 5, 7, 8, 11 and 12, with aggregates that are computed as events come.
 *
 * <p>Arguments: query, state backend (hashmap, rocksdb), parallelism, file of the events, events, events that are not
 * measured, file for the results, folder for checkpoints, milliseconds between two checkpoints.
 *
 * <p>An event has 33 bytes: its kind (0 a person, 1 an auction, 2 a bid), auction, person, price, and time in microseconds.
 * Flink's times are numbers: here they are microseconds, too, so that no two become equal. Prints one line of JSON.
 */
public class FlinkNexmark {
  static final int EVENT_BYTES = 33, BUCKETS = 64;
  static final byte PERSON = 0, AUCTION = 1, BID = 2;
  static final long SECOND = 1_000_000L, DISORDER = 2 * SECOND, CAME = 1, OPENED = 1L << 32;
  static final AtomicLong measuredFrom = new AtomicLong();
  static final AtomicLong measuredTo = new AtomicLong();
  static final AtomicLong read = new AtomicLong();
  static final AtomicLong checkpoints = new AtomicLong();
  static final Queue<String> results = new ConcurrentLinkedQueue<>();

  /** What a query needs of an event. */
  public static class Item {
    public long key;
    public long value;

    public Item() {}
  }

  public static class Counted {
    public long end;
    public long auction;
    public long bids;

    public Counted() {}
  }

  static class Plan implements Serializable {
    String query, file;
    int parallelism;
    long events, skipped;

    /** The item of an event, or null if the query does not need the event. */
    Item item(byte kind, long auction, long person, long price) {
      boolean wanted = query.equals("q8") ? kind != BID : kind == BID;
      if (!wanted) return null;
      Item item = new Item();
      switch (query) {
        case "q5" -> {
          item.key = auction;
          item.value = 1;
        }
        case "q7" -> {
          item.key = auction % BUCKETS;
          item.value = price;
        }
        case "q8" -> {
          item.key = person;
          item.value = kind == PERSON ? CAME : OPENED;
        }
        default -> {
          item.key = person;
          item.value = 1;
        }
      }
      return item;
    }
  }

  static void now(AtomicLong at) {
    at.accumulateAndGet(System.nanoTime(), Math::max);
  }

  /** Each of the parallel instances reads every n-th event. The watermark is as far behind the latest as events may be. */
  static class Events extends RichParallelSourceFunction<Item> implements CheckpointListener {
    static final int AT_ONCE = 500;
    final Plan plan;
    volatile boolean cancelled;

    Events(Plan plan) {
      this.plan = plan;
    }

    @Override
    public void run(SourceContext<Item> context) throws Exception {
      long instance = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask(), latest = Long.MIN_VALUE, count = 0;
      try (FileChannel channel = FileChannel.open(Path.of(plan.file))) {
        ByteBuffer bytes = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size()).order(ByteOrder.LITTLE_ENDIAN);
        for (long at = instance; at < plan.events && !cancelled; ) {
          synchronized (context.getCheckpointLock()) {
            for (int i = 0; i < AT_ONCE && at < plan.events; i++, at += plan.parallelism, count++) {
              if (count == plan.skipped / plan.parallelism) now(measuredFrom);
              int place = (int) (at * EVENT_BYTES);
              long time = bytes.getLong(place + 25);
              latest = Math.max(latest, time);
              Item item =
                  plan.item(bytes.get(place), bytes.getLong(place + 1), bytes.getLong(place + 9), bytes.getLong(place + 17));
              if (item != null) context.collectWithTimestamp(item, time);
            }
            context.emitWatermark(new Watermark(latest - DISORDER - 1));
          }
        }
      }
      read.addAndGet(count);
      now(measuredTo);
    }

    @Override
    public void cancel() {
      cancelled = true;
    }

    @Override
    public void notifyCheckpointComplete(long id) {
      if (getRuntimeContext().getTaskInfo().getIndexOfThisSubtask() == 0) checkpoints.incrementAndGet();
    }
  }

  static class Sum implements AggregateFunction<Item, long[], Long> {
    @Override
    public long[] createAccumulator() {
      return new long[1];
    }

    @Override
    public long[] add(Item item, long[] sum) {
      sum[0] += item.value;
      return sum;
    }

    @Override
    public Long getResult(long[] sum) {
      return sum[0];
    }

    @Override
    public long[] merge(long[] one, long[] other) {
      return new long[] {one[0] + other[0]};
    }
  }

  static class Highest extends Sum {
    @Override
    public long[] add(Item item, long[] most) {
      most[0] = Math.max(most[0], item.value);
      return most;
    }

    @Override
    public long[] merge(long[] one, long[] other) {
      return new long[] {Math.max(one[0], other[0])};
    }
  }

  static class Count extends ProcessWindowFunction<Long, Counted, Long, TimeWindow> {
    @Override
    public void process(Long key, Context context, Iterable<Long> sums, Collector<Counted> out) {
      Counted counted = new Counted();
      counted.end = context.window().getEnd();
      counted.auction = key;
      counted.bids = sums.iterator().next();
      out.collect(counted);
    }
  }

  /** The most bids of a window, and the auctions that have as many: the first is the number of bids. */
  static class Best implements AggregateFunction<Counted, ArrayList<Long>, String> {
    @Override
    public ArrayList<Long> createAccumulator() {
      return new ArrayList<>();
    }

    @Override
    public ArrayList<Long> add(Counted counted, ArrayList<Long> best) {
      if (best.isEmpty() || counted.bids > best.get(0)) {
        best.clear();
        best.add(counted.bids);
      }
      if (counted.bids == best.get(0)) best.add(counted.auction);
      return best;
    }

    @Override
    public String getResult(ArrayList<Long> best) {
      String auctions = best.stream().skip(1).sorted().map(String::valueOf).collect(Collectors.joining(";"));
      return best.get(0) + "," + auctions;
    }

    @Override
    public ArrayList<Long> merge(ArrayList<Long> one, ArrayList<Long> other) {
      if (one.isEmpty() || other.isEmpty()) return one.isEmpty() ? other : one;
      if (one.get(0) < other.get(0)) return other;
      if (one.get(0).equals(other.get(0))) one.addAll(other.subList(1, other.size()));
      return one;
    }
  }

  static class WithEnd extends ProcessWindowFunction<String, String, Long, TimeWindow> {
    @Override
    public void process(Long end, Context context, Iterable<String> best, Collector<String> out) {
      out.collect(end + "," + best.iterator().next());
    }
  }

  static class Bucket extends ProcessWindowFunction<Long, Item, Long, TimeWindow> {
    @Override
    public void process(Long key, Context context, Iterable<Long> highest, Collector<Item> out) {
      Item item = new Item();
      item.value = highest.iterator().next();
      out.collect(item);
    }
  }

  static class WithStart extends ProcessAllWindowFunction<Long, String, TimeWindow> {
    @Override
    public void process(Context context, Iterable<Long> highest, Collector<String> out) {
      out.collect(context.window().getStart() + "," + highest.iterator().next());
    }
  }

  static class Opened extends ProcessWindowFunction<Long, String, Long, TimeWindow> {
    @Override
    public void process(Long person, Context context, Iterable<Long> sums, Collector<String> out) {
      long sum = sums.iterator().next();
      if (sum % OPENED > 0 && sum / OPENED > 0) out.collect(context.window().getStart() + "," + person + "," + sum / OPENED);
    }
  }

  static class Bids extends ProcessWindowFunction<Long, String, Long, TimeWindow> {
    @Override
    public void process(Long person, Context context, Iterable<Long> sums, Collector<String> out) {
      out.collect(context.window().getStart() + "," + person + "," + sums.iterator().next());
    }
  }

  /** When the clock reaches a window's end, or when the input ends: else the last windows would have no result. */
  static class ByClock extends Trigger<Item, TimeWindow> {
    @Override
    public TriggerResult onElement(Item item, long time, TimeWindow window, TriggerContext context) {
      context.registerProcessingTimeTimer(window.maxTimestamp());
      context.registerEventTimeTimer(Long.MAX_VALUE);
      return TriggerResult.CONTINUE;
    }

    @Override
    public TriggerResult onProcessingTime(long time, TimeWindow window, TriggerContext context) {
      return TriggerResult.FIRE;
    }

    @Override
    public TriggerResult onEventTime(long time, TimeWindow window, TriggerContext context) {
      return TriggerResult.FIRE;
    }

    @Override
    public void clear(TimeWindow window, TriggerContext context) {
      context.deleteProcessingTimeTimer(window.maxTimestamp());
      context.deleteEventTimeTimer(Long.MAX_VALUE);
    }
  }

  static class Keep extends RichMapFunction<String, String> {
    @Override
    public String map(String result) {
      results.add(result);
      now(measuredTo);
      return result;
    }
  }

  static Duration seconds(long number) {
    return Duration.ofMillis(number * SECOND);
  }

  static DataStream<String> answers(String query, DataStream<Item> items) {
    KeyedStream<Item, Long> keyed = items.keyBy(item -> item.key);
    return switch (query) {
      case "q5" -> keyed
          .window(SlidingEventTimeWindows.of(seconds(10), seconds(2)))
          .aggregate(new Sum(), new Count())
          .keyBy(counted -> counted.end)
          .window(TumblingEventTimeWindows.of(seconds(2)))
          .aggregate(new Best(), new WithEnd());
      case "q7" -> keyed
          .window(TumblingEventTimeWindows.of(seconds(10)))
          .aggregate(new Highest(), new Bucket())
          .windowAll(TumblingEventTimeWindows.of(seconds(10)))
          .aggregate(new Highest(), new WithStart());
      case "q8" -> keyed.window(TumblingEventTimeWindows.of(seconds(10))).aggregate(new Sum(), new Opened());
      case "q11" -> keyed.window(EventTimeSessionWindows.withGap(seconds(10))).aggregate(new Sum(), new Bids());
      default -> keyed
          .window(TumblingProcessingTimeWindows.of(Duration.ofSeconds(10)))
          .trigger(new ByClock())
          .aggregate(new Sum(), new Bids());
    };
  }

  public static void main(String[] args) throws Exception {
    Plan plan = new Plan();
    plan.query = args[0];
    plan.parallelism = Integer.parseInt(args[2]);
    plan.file = args[3];
    plan.events = Long.parseLong(args[4]);
    plan.skipped = Long.parseLong(args[5]);
    var conf = FlinkSetup.configuration(args[1], "1g", "128m", args[7], args[8] + " ms");
    StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(plan.parallelism, conf);
    env.getConfig().enableObjectReuse();
    DataStream<Item> items = env.addSource(new Events(plan), "events", TypeInformation.of(Item.class));
    answers(plan.query, items).map(new Keep()).sinkTo(new DiscardingSink<>());
    long begin = System.nanoTime();
    env.execute();
    double wall = (System.nanoTime() - begin) / 1e9;
    try (PrintWriter out = new PrintWriter(Files.newBufferedWriter(Path.of(args[6])))) {
      results.forEach(out::println);
    }
    System.out.printf(
        "{\"events\": %d, \"wall_s\": %.3f, \"measured_s\": %.3f, \"results\": %d, \"checkpoints\": %d}%n",
        read.get(), wall, (measuredTo.get() - measuredFrom.get()) / 1e9, results.size(), checkpoints.get());
    System.exit(0);
  }
}
