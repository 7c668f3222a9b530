import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.zip.CRC32;
import org.apache.iceberg.BaseTable;
import org.apache.iceberg.FileScanTask;
import org.apache.iceberg.Files;
import org.apache.iceberg.StaticTableOperations;
import org.apache.iceberg.TableScan;
import org.apache.iceberg.expressions.Expression;
import org.apache.iceberg.expressions.ExpressionParser;
import org.apache.iceberg.expressions.Expressions;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.io.FileIO;
import org.apache.iceberg.io.InputFile;
import org.apache.iceberg.io.OutputFile;

/**
 * Iceberg's own planner as a process: each line of standard input is a filter (a REST expression as JSON, on one line),
 * each line of standard output what planning it once took. Usage: PlanFiles file:///…/v1.metadata.json
 *
 * <p>Files are read with plain java.nio streams, which is the fastest FileIO there is for a local disk.
 */
public class PlanFiles {
  static final class LocalIO implements FileIO {
    private static String path(String location) {
      return location.startsWith("file://") ? location.substring(7) : location;
    }

    @Override
    public InputFile newInputFile(String location) {
      return Files.localInput(path(location));
    }

    @Override
    public OutputFile newOutputFile(String location) {
      return Files.localOutput(path(location));
    }

    @Override
    public void deleteFile(String location) {
      throw new UnsupportedOperationException("this program only reads");
    }
  }

  public static void main(String[] args) throws Exception {
    BaseTable table = new BaseTable(new StaticTableOperations(args[0], new LocalIO()), "bench");
    table.currentSnapshot();
    System.out.println("{\"columns\":" + table.schema().columns().size() + "}");
    BufferedReader wanted = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
    for (String line = wanted.readLine(); line != null; line = wanted.readLine()) {
      Expression filter =
          line.equals("true") ? Expressions.alwaysTrue() : ExpressionParser.fromJson(line, table.schema());
      long files = 0;
      long bytes = 0;
      long paths = 0;
      long spent = 0;
      long started = System.nanoTime();
      TableScan scan = table.newScan().filter(filter);
      try (CloseableIterable<FileScanTask> tasks = scan.planFiles()) {
        for (FileScanTask task : tasks) {
          files += 1;
          bytes += task.file().fileSizeInBytes();
          long counted = System.nanoTime();
          CRC32 sum = new CRC32();
          sum.update(task.file().location().getBytes("UTF-8"));
          paths += sum.getValue();
          spent += System.nanoTime() - counted;
        }
      }
      // The check of the answer is ours, not the planner's: its time is taken off.
      double ms = (System.nanoTime() - started - spent) / 1e6;
      System.out.println(
          String.format(
              "{\"ms\":%.3f,\"files\":%d,\"bytes\":%d,\"paths\":%d}", ms, files, bytes, paths));
    }
  }
}
