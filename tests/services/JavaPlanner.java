import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.nio.file.Paths;
import org.apache.iceberg.BaseTable;
import org.apache.iceberg.DeleteFile;
import org.apache.iceberg.FileScanTask;
import org.apache.iceberg.Files;
import org.apache.iceberg.Schema;
import org.apache.iceberg.SnapshotRef;
import org.apache.iceberg.StaticTableOperations;
import org.apache.iceberg.TableMetadata;
import org.apache.iceberg.TableMetadataParser;
import org.apache.iceberg.TableScan;
import org.apache.iceberg.expressions.Expression;
import org.apache.iceberg.expressions.ExpressionParser;
import org.apache.iceberg.expressions.Expressions;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.io.FileIO;
import org.apache.iceberg.io.InputFile;
import org.apache.iceberg.io.OutputFile;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.JsonNode;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.node.ArrayNode;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.node.ObjectNode;

/** Iceberg's own planner over tables on local disk: one JSON request a line on stdin, one JSON answer a line on stdout. */
public class JavaPlanner {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final FileIO IO = new LocalIO();

  private static String loaded = null;
  private static TableMetadata metadata = null;

  public static void main(String[] args) throws Exception {
    BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    for (String line = requests.readLine(); line != null; line = requests.readLine()) {
      ObjectNode answer = JSON.createObjectNode();
      try {
        plan(JSON.readTree(line), answer);
      } catch (Exception | StackOverflowError refused) {
        answer.removeAll();
        answer.put("error", refused.getClass().getSimpleName() + ": " + refused.getMessage());
      }
      answers.println(answer);
      answers.flush();
    }
  }

  private static void plan(JsonNode request, ObjectNode answer) throws Exception {
    String location = request.get("metadata").asText();
    if (!location.equals(loaded)) {
      metadata = TableMetadataParser.read(IO, location);
      loaded = location;
    }
    TableMetadata base = metadata;
    boolean caseSensitive = request.get("case-sensitive").asBoolean();
    TableScan scan;
    if (!request.hasNonNull("snapshot-id")) {
      scan = tableOf(base).newScan();
    } else if (request.get("names").asText().equals("snapshot")) {
      scan = tableOf(base).newScan().useSnapshot(request.get("snapshot-id").asLong());
    } else {
      // a branch is read with the table's current schema, whatever snapshot it is at
      SnapshotRef ref = SnapshotRef.branchBuilder(request.get("snapshot-id").asLong()).build();
      base = TableMetadata.buildFrom(base).setRef("asked", ref).discardChanges().build();
      scan = tableOf(base).newScan().useRef("asked");
    }
    Expression filter = expression(request.get("filter"), scan.schema());
    scan = scan.caseSensitive(caseSensitive).filter(filter);
    ArrayNode tasks = answer.putArray("tasks");
    try (CloseableIterable<FileScanTask> planned = scan.planFiles()) {
      for (FileScanTask task : planned) {
        ObjectNode written = tasks.addObject();
        written.put("path", task.file().location());
        ArrayNode deletes = written.putArray("deletes");
        for (DeleteFile delete : task.deletes()) {
          boolean vector = delete.contentOffset() != null;
          deletes.add(vector ? delete.location() + "#" + delete.contentOffset() : delete.location());
        }
        written.set("residual", JSON.readTree(ExpressionParser.toJson(task.residual())));
      }
    }
  }

  private static BaseTable tableOf(TableMetadata metadata) {
    return new BaseTable(new StaticTableOperations(metadata, IO), "oracle", report -> {});
  }

  /** Parsed with the schema, as ISO literals need; a predicate that this refuses is parsed as Java writes its own. */
  private static Expression expression(JsonNode json, Schema schema) {
    String type = json.isObject() ? json.get("type").asText() : "";
    switch (type) {
      case "and":
        return Expressions.and(expression(json.get("left"), schema), expression(json.get("right"), schema));
      case "or":
        return Expressions.or(expression(json.get("left"), schema), expression(json.get("right"), schema));
      case "not":
        return Expressions.not(expression(json.get("child"), schema));
      default:
        try {
          return ExpressionParser.fromJson(json.toString(), schema);
        } catch (IllegalArgumentException notAsIso) {
          return ExpressionParser.fromJson(json.toString());
        }
    }
  }

  private static class LocalIO implements FileIO {
    @Override
    public InputFile newInputFile(String location) {
      return Files.localInput(Paths.get(URI.create(location)).toFile());
    }

    @Override
    public OutputFile newOutputFile(String location) {
      throw new UnsupportedOperationException("a planner only reads: " + location);
    }

    @Override
    public void deleteFile(String location) {
      throw new UnsupportedOperationException("a planner only reads: " + location);
    }
  }
}
