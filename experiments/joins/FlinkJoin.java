import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.time.Duration;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.co.ProcessJoinFunction;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.streaming.api.watermark.Watermark;
import org.apache.flink.util.Collector;

/**
 * Orders and payments, joined by Flink's interval join, which drops what is later than the watermark.
 *
 * <p>Arguments: state backend (hashmap, rocksdb), parallelism, file of the rows, number of rows, rows that are not
 * measured, seconds that a payment may come after its order, folder for checkpoints, milliseconds between two
 * checkpoints.
 *
 * <p>A row has 25 bytes, little endian: its side (0 an order, 1 a payment, 2 the end of a batch), id, time in
 * microseconds, and price or amount. The time of the end of a batch is the watermark behind it: the smaller one of the
 * latest times of both sides. Prints one line of JSON.
 */
public class FlinkJoin {
  static final int ROW_BYTES = 25;
  static final byte ORDER = 0, PAYMENT = 1;
  static final AtomicLong measuredFrom = new AtomicLong();
  static final AtomicLong measuredTo = new AtomicLong();
  static final AtomicLong read = new AtomicLong();
  static final AtomicLong pairs = new AtomicLong();

  public static class Row {
    public boolean isOrder;
    public long id;
    public long time;
    public double value;

    public Row() {}
  }

  public static class Paid {
    public long id;
    public long ordered;
    public double price;
    public long paid;
    public double amount;

    public Paid() {}
  }

  static void now(AtomicLong at) {
    at.accumulateAndGet(System.nanoTime(), Math::max);
  }

  /** Each of the parallel instances reads every n-th row, and each end of a batch. */
  static class Rows extends RichParallelSourceFunction<Row> {
    final String file;
    final int parallelism;
    final long rows;
    final long skipped;
    volatile boolean cancelled;

    Rows(String file, int parallelism, long rows, long skipped) {
      this.file = file;
      this.parallelism = parallelism;
      this.rows = rows;
      this.skipped = skipped;
    }

    @Override
    public void run(SourceContext<Row> context) throws Exception {
      long instance = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask(), count = 0;
      try (FileChannel channel = FileChannel.open(Path.of(file))) {
        ByteBuffer bytes = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size()).order(ByteOrder.LITTLE_ENDIAN);
        for (long at = 0; at < rows && !cancelled; at++) {
          if (at == skipped) now(measuredFrom);
          int place = (int) (at * ROW_BYTES);
          byte side = bytes.get(place);
          if (side > PAYMENT) {
            context.emitWatermark(new Watermark(bytes.getLong(place + 9)));
          } else if (at % parallelism == instance) {
            Row row = new Row();
            row.isOrder = side == ORDER;
            row.id = bytes.getLong(place + 1);
            row.time = bytes.getLong(place + 9);
            row.value = bytes.getDouble(place + 17);
            synchronized (context.getCheckpointLock()) {
              context.collectWithTimestamp(row, row.time);
            }
            count++;
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
  }

  static class Pair extends ProcessJoinFunction<Row, Row, Paid> {
    @Override
    public void processElement(Row order, Row payment, Context context, Collector<Paid> out) {
      Paid paid = new Paid();
      paid.id = order.id;
      paid.ordered = order.time;
      paid.price = order.value;
      paid.paid = payment.time;
      paid.amount = payment.value;
      out.collect(paid);
    }
  }

  public static void main(String[] args) throws Exception {
    int parallelism = Integer.parseInt(args[1]);
    var conf = FlinkSetup.configuration(args[0], "1g", "128m", args[6], args[7] + " ms");
    StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(parallelism, conf);
    env.getConfig().enableObjectReuse();
    Rows source = new Rows(args[2], parallelism, Long.parseLong(args[3]), Long.parseLong(args[4]));
    DataStream<Row> rows = env.addSource(source, "rows", TypeInformation.of(Row.class));
    rows.filter(row -> row.isOrder)
        .keyBy(row -> row.id)
        .intervalJoin(rows.filter(row -> !row.isOrder).keyBy(row -> row.id))
        // A time is a number of milliseconds for Flink, and of microseconds here.
        .between(Duration.ofMillis(0), Duration.ofMillis(Long.parseLong(args[5]) * 1_000_000L))
        .process(new Pair())
        .map(
            paid -> {
              pairs.incrementAndGet();
              now(measuredTo);
              return paid;
            })
        .returns(Paid.class)
        .sinkTo(new DiscardingSink<>());
    long begin = System.nanoTime();
    env.execute();
    System.out.printf(
        "{\"rows\": %d, \"wall_s\": %.3f, \"measured_s\": %.3f, \"pairs\": %d}%n",
        read.get(), (System.nanoTime() - begin) / 1e9, (measuredTo.get() - measuredFrom.get()) / 1e9, pairs.get());
    System.exit(0);
  }
}
