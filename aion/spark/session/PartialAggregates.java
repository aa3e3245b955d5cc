// Plans a marked node as Spark's own hash aggregate of each source partition, without a shuffle and without state.
//
// A marked node is an observation (Dataset.observe) with this name: "MARKER", the number of columns that are for Python,
// a number of the call, and the name of the operator, with colons between. The metrics whose names begin with "group"
// hold, inside max(...), what rows are grouped by; all others are the aggregates. Python puts the words in capitals in,
// and compiles this file (aion/spark/session/partials.py). Only the driver's JVM loads the class.

package aion;

import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateExpression;
import org.apache.spark.sql.catalyst.planning.PhysicalAggregation;
import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.CollectMetrics;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.aggregate.HashAggregateExec;
import org.apache.spark.sql.internal.SQLConf;
import scala.Option;
import scala.Tuple4;
import scala.collection.Iterator;
import scala.collection.immutable.Seq;
import scala.jdk.javaapi.CollectionConverters;

public class PartialAggregates extends SparkStrategy {
    // The calls whose events are not worth grouping, because few of them share a group.
    private final Set ungrouped = ConcurrentHashMap.newKeySet();

    public void setGrouped(String call, boolean grouped) {
        if (grouped) {
            ungrouped.remove(call);
        } else {
            ungrouped.add(call);
        }
    }

    public Seq apply(LogicalPlan plan) {
        List found = new ArrayList();
        if (plan instanceof CollectMetrics && ((CollectMetrics) plan).name().startsWith("MARKER:")) {
            CollectMetrics marker = (CollectMetrics) plan;
            String[] name = marker.name().split(":", 4);
            LogicalPlan child = (LogicalPlan) marker.child();
            // If the definition has changed, only tasks know all edges of slices.
            boolean asRows = ungrouped.contains(name[2]) || SQLConf.get().contains("PAST" + name[3]);
            found.add(
                asRows
                    ? new ProjectExec((Seq) child.output().take(Integer.parseInt(name[1])), planLater(child))
                    : aggregated(marker, child));
        }
        return seq(found);
    }

    private SparkPlan aggregated(CollectMetrics marker, LogicalPlan child) {
        List groups = new ArrayList();
        List results = new ArrayList();
        for (Iterator metrics = marker.metrics().iterator(); metrics.hasNext(); ) {
            Alias metric = (Alias) metrics.next();
            if (metric.name().startsWith("group")) {
                Expression group = (Expression) ((AggregateExpression) metric.child()).aggregateFunction().children().head();
                groups.add(group);
                List only = new ArrayList();
                only.add(group);
                results.add(metric.withNewChildren(seq(only)));
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

    private static Seq seq(List values) {
        return CollectionConverters.asScala(values).toSeq();
    }
}
