// Plans a marked node as Spark's own hash aggregate of each source partition, without a shuffle and without state.
//
// A marked node is an observation (Dataset.observe) with this name: "MARKER", the number of columns that are for Python,
// a number of the call, and the name of the operator, with colons between. The metrics whose names begin with "group"
// hold, inside max(...), what rows are grouped by, and "shard" holds where they go; all others are the aggregates.
//
// Where few rows leave the aggregate, it also stands for the function of Python above it: the rows go to the root as
// they are, each as one binary value (aion/core/ingest/packed.py). But a function of Python also asks the shards in some
// batches, so it stays in those. Spark's own expressions make the values, because executors have no class of this file.
//
// Python puts the words in capitals in, and compiles this file (aion/spark/session/partials.py). Only the driver's JVM
// loads the class.

package aion;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.BitwiseOr;
import org.apache.spark.sql.catalyst.expressions.Cast;
import org.apache.spark.sql.catalyst.expressions.Coalesce;
import org.apache.spark.sql.catalyst.expressions.Concat;
import org.apache.spark.sql.catalyst.expressions.EvalMode;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.If;
import org.apache.spark.sql.catalyst.expressions.IsNotNull;
import org.apache.spark.sql.catalyst.expressions.IsNull;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.OctetLength;
import org.apache.spark.sql.catalyst.expressions.PreciseTimestampConversion;
import org.apache.spark.sql.catalyst.expressions.UnixDate;
import org.apache.spark.sql.catalyst.expressions.UnscaledValue;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateExpression;
import org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke;
import org.apache.spark.sql.catalyst.planning.PhysicalAggregation;
import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.CollectMetrics;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.MapInArrow;
import org.apache.spark.sql.execution.FilterExec;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.aggregate.HashAggregateExec;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.DoubleType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.TimestampNTZType;
import org.apache.spark.sql.types.TimestampType;
import scala.Option;
import scala.Tuple4;
import scala.collection.Iterator;
import scala.collection.immutable.Seq;
import scala.jdk.javaapi.CollectionConverters;

public class PartialAggregates extends SparkStrategy {
    // How the rows of a call cross: "rows", "grouped" (also if it is not here), or "packed".
    private final Map ways = new ConcurrentHashMap();

    public void setWay(String call, String way) {
        ways.put(call, way);
    }

    public Seq apply(LogicalPlan plan) {
        List found = new ArrayList();
        if (plan instanceof MapInArrow && isMarked((LogicalPlan) ((MapInArrow) plan).child())) {
            CollectMetrics marker = (CollectMetrics) ((MapInArrow) plan).child();
            String[] name = nameOf(marker);
            if ("packed".equals(ways.get(name[2])) && !asRows(name) && !asksShards(name)) {
                found.add(packed((Seq) ((MapInArrow) plan).output(), marker));
            }
        } else if (isMarked(plan)) {
            CollectMetrics marker = (CollectMetrics) plan;
            LogicalPlan child = (LogicalPlan) marker.child();
            String[] name = nameOf(marker);
            found.add(
                asRows(name)
                    ? new ProjectExec((Seq) child.output().take(Integer.parseInt(name[1])), planLater(child))
                    : aggregated(marker, false));
        }
        return seq(found);
    }

    private static boolean isMarked(LogicalPlan plan) {
        return plan instanceof CollectMetrics && ((CollectMetrics) plan).name().startsWith("MARKER:");
    }

    private static String[] nameOf(CollectMetrics marker) {
        return marker.name().split(":", 4);
    }

    // If the definition has changed, only tasks know all edges of slices.
    private boolean asRows(String[] name) {
        return "rows".equals(ways.get(name[2])) || SQLConf.get().contains("PAST" + name[3]);
    }

    // Whether a function of Python has more to do in this batch than to send its rows to the shards of the session.
    private static boolean asksShards(String[] name) {
        String[] quiet = SQLConf.get().getConfString("QUIET", "").split(" ");
        String batch = SparkContext.getOrCreate().getLocalProperty("streaming.sql.batchId");
        if (quiet.length < 2 || batch == null || SQLConf.get().contains("STORED" + name[3])) {
            return true;
        }
        long number = Long.parseLong(batch);
        return number < Long.parseLong(quiet[0]) || number > Long.parseLong(quiet[1]);
    }

    private SparkPlan aggregated(CollectMetrics marker, boolean withShard) {
        LogicalPlan child = (LogicalPlan) marker.child();
        List groups = new ArrayList();
        List results = new ArrayList();
        for (Iterator metrics = marker.metrics().iterator(); metrics.hasNext(); ) {
            Alias metric = (Alias) metrics.next();
            if (metric.name().startsWith("group")) {
                Expression group = withinMax(metric);
                groups.add(group);
                results.add(metric.withNewChildren(seq(listOf(group))));
            } else if (metric.name().equals("shard")) {
                if (withShard) {
                    results.add(metric.withNewChildren(seq(listOf(withinMax(metric)))));
                }
            } else {
                results.add(metric);
            }
        }
        Tuple4 parts = (Tuple4) PhysicalAggregation.unapply(aggregate(seq(groups), seq(results), child)).get();
        List attributes = new ArrayList();
        for (Iterator each = ((Seq) parts._2()).iterator(); each.hasNext(); ) {
            attributes.add(((AggregateExpression) each.next()).resultAttribute());
        }
        return new HashAggregateExec(
            Option.empty(), false, Option.empty(), (Seq) parts._1(), (Seq) parts._2(), seq(attributes), 0,
            (Seq) parts._3(), planLater(child));
    }

    // Its last argument, hints, is not there in each version of Spark.
    private static Aggregate aggregate(Seq groups, Seq results, LogicalPlan child) {
        try {
            java.lang.reflect.Constructor made = Aggregate.class.getConstructors()[0];
            Object[] arguments = new Object[made.getParameterCount()];
            arguments[0] = groups;
            arguments[1] = results;
            arguments[2] = child;
            for (int more = 3; more < arguments.length; more++) {
                arguments[more] = Option.empty();
            }
            return (Aggregate) made.newInstance(arguments);
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    private static Expression withinMax(Alias metric) {
        return (Expression) ((AggregateExpression) metric.child()).aggregateFunction().children().head();
    }

    // The rows of the aggregate, as packed.py describes them.
    private SparkPlan packed(Seq output, CollectMetrics marker) {
        SparkPlan groups = aggregated(marker, true);
        Expression shard = null;
        Expression slice = null;
        List nulls = new ArrayList();
        List fields = new ArrayList();
        List bytes = new ArrayList();
        Expression word = null;
        for (Iterator each = ((Seq) groups.output()).iterator(); each.hasNext(); ) {
            Attribute column = (Attribute) each.next();
            if (column.name().equals("shard")) {
                shard = column;
                continue;
            }
            slice = slice == null ? column : slice;
            int bit = fields.size() % 64;
            if (bit == 0 && word != null) {
                nulls.add(inBytes(word));
                word = null;
            }
            Expression isNull = new If(new IsNull(column), number(1L << bit), number(0L));
            word = word == null ? isNull : new BitwiseOr(word, isNull);
            Expression field = field(column);
            if (field == null) {
                List either = listOf(asBytes(column));
                either.add(new Literal(new byte[0], DataTypes.BinaryType));
                bytes.add(new Coalesce(seq(either)));
                field = as(new OctetLength(asBytes(column)), DataTypes.LongType);
            }
            List either = listOf(field);
            either.add(number(0L));
            fields.add(inBytes(new Coalesce(seq(either))));
        }
        nulls.add(inBytes(word));
        List all = listOf(new Literal("MAGIC".getBytes(StandardCharsets.US_ASCII), DataTypes.BinaryType));
        all.addAll(nulls);
        all.addAll(fields);
        all.addAll(bytes);
        List columns = listOf(named(shard, (Attribute) output.head()));
        columns.add(named(new Concat(seq(all)), (Attribute) output.last()));
        // Rows without a slice are no events. Sent, they would open shards in batches that have nothing for them.
        return new ProjectExec(seq(columns), new FilterExec(new IsNotNull(slice), groups));
    }

    // A value as a bigint. Null: it is sent as bytes.
    private static Expression field(Attribute column) {
        DataType type = column.dataType();
        if (type instanceof TimestampType || type instanceof TimestampNTZType) {
            return new PreciseTimestampConversion(column, type, DataTypes.LongType);
        } else if (type instanceof DateType) {
            return as(new UnixDate(column), DataTypes.LongType);
        } else if (type instanceof FloatType || type instanceof DoubleType) {
            List value = listOf(as(column, DataTypes.DoubleType));
            return new StaticInvoke(
                Double.class, DataTypes.LongType, "doubleToLongBits", seq(value), seq(new ArrayList()), true, true, true,
                Option.empty());
        } else if (type instanceof DecimalType) {
            return ((DecimalType) type).precision() <= 18 ? new UnscaledValue(column) : null;
        }
        return type instanceof StringType || type instanceof BinaryType ? null : as(column, DataTypes.LongType);
    }

    private static Expression asBytes(Attribute column) {
        Expression text = column.dataType() instanceof DecimalType ? as(column, DataTypes.StringType) : column;
        return as(text, DataTypes.BinaryType);
    }

    private static Expression inBytes(Expression number) {
        return as(number, DataTypes.BinaryType);
    }

    private static Expression as(Expression value, DataType type) {
        return value.dataType().equals(type) ? value : new Cast(value, type, Option.empty(), EvalMode.LEGACY());
    }

    private static Expression number(long value) {
        return new Literal(Long.valueOf(value), DataTypes.LongType);
    }

    private static Alias named(Expression value, Attribute as) {
        return new Alias(value, as.name(), as.exprId(), as.qualifier(), Option.empty(), seq(new ArrayList()));
    }

    private static List listOf(Object first) {
        List made = new ArrayList();
        made.add(first);
        return made;
    }

    private static Seq seq(List values) {
        return CollectionConverters.asScala(values).toSeq();
    }
}
