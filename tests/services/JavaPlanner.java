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

/**
 * Plans scans of tables on a local disk with Iceberg's own planner. Each line of the input is a request in JSON, and each
 * line of the output is its answer.
 */
public class JavaPlanner {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final FileIO IO = new LocalIO();

  private static String loadedLocation = null;
  private static TableMetadata metadata = null;

  public static void main(String[] args) throws Exception {
    BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    for (String line = requests.readLine(); line != null; line = requests.readLine()) {
      ObjectNode answer = JSON.createObjectNode();
      try {
        plan(JSON.readTree(line), answer);
      } catch (Exception | StackOverflowError error) {
        answer.removeAll();
        answer.put("error", error.getClass().getSimpleName() + ": " + error.getMessage());
      }
      answers.println(answer);
      answers.flush();
    }
  }

  private static void plan(JsonNode request, ObjectNode answer) throws Exception {
    String location = request.get("metadata").asText();
    if (!location.equals(loadedLocation)) {
      metadata = TableMetadataParser.read(IO, location);
      loadedLocation = location;
    }
    TableMetadata base = metadata;
    boolean caseSensitive = request.get("case-sensitive").asBoolean();
    TableScan scan;
    if (!request.hasNonNull("snapshot-id")) {
      scan = openTable(base).newScan();
    } else if (request.get("names").asText().equals("snapshot")) {
      scan = openTable(base).newScan().useSnapshot(request.get("snapshot-id").asLong());
    } else {
      // Iceberg reads a branch with the current schema of the table, whatever its snapshot.
      SnapshotRef ref = SnapshotRef.branchBuilder(request.get("snapshot-id").asLong()).build();
      base = TableMetadata.buildFrom(base).setRef("requested", ref).discardChanges().build();
      scan = openTable(base).newScan().useRef("requested");
    }
    Expression filter = parseExpression(request.get("filter"), scan.schema());
    scan = scan.caseSensitive(caseSensitive).filter(filter);
    ArrayNode tasks = answer.putArray("tasks");
    try (CloseableIterable<FileScanTask> planned = scan.planFiles()) {
      for (FileScanTask task : planned) {
        ObjectNode taskDocument = tasks.addObject();
        taskDocument.put("path", task.file().location());
        ArrayNode deletes = taskDocument.putArray("deletes");
        for (DeleteFile delete : task.deletes()) {
          boolean isVector = delete.contentOffset() != null;
          deletes.add(isVector ? delete.location() + "#" + delete.contentOffset() : delete.location());
        }
        taskDocument.set("residual", JSON.readTree(ExpressionParser.toJson(task.residual())));
      }
    }
  }

  private static BaseTable openTable(TableMetadata metadata) {
    return new BaseTable(new StaticTableOperations(metadata, IO), "oracle", report -> {});
  }

  /** Parses a filter. ISO literals need the schema. Other predicates are parsed without it, as Java writes them. */
  private static Expression parseExpression(JsonNode json, Schema schema) {
    String type = json.isObject() ? json.get("type").asText() : "";
    switch (type) {
      case "and":
        return Expressions.and(parseExpression(json.get("left"), schema), parseExpression(json.get("right"), schema));
      case "or":
        return Expressions.or(parseExpression(json.get("left"), schema), parseExpression(json.get("right"), schema));
      case "not":
        return Expressions.not(parseExpression(json.get("child"), schema));
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
