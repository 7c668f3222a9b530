import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.HashMap;
import java.util.stream.StreamSupport;
import org.apache.iceberg.aws.s3.S3FileIO;
import org.apache.iceberg.io.InputFile;
import org.apache.iceberg.io.PositionOutputStream;
import org.apache.iceberg.io.SeekableInputStream;

/**
  * Use Iceberg's S3FileIO on the files of one table. The arguments are the location of the table, a file of another
  * table, and then properties in the form name=value.
  */
public class SignedFiles {
  public static void main(String[] args) throws Exception {
    String table = args[0];
    Map<String, String> properties = new HashMap<>();
    for (String pair : Arrays.asList(args).subList(2, args.length)) {
      String[] halves = pair.split("=", 2);
      properties.put(halves[0], halves[1]);
    }
    try (S3FileIO io = new S3FileIO()) {
      io.initialize(properties);
      String small = table + "/data/dt=2026-01-01/p=a%2Fb/x y+z.parquet";
      write(io, small, 1000);
      check(io.newInputFile(small).exists(), "the small file exists");
      check(io.newInputFile(small).getLength() == 1000, "its length is known");
      String large = table + "/data/large.bin";
      write(io, large, 12 << 20);
      InputFile input = io.newInputFile(large);
      try (SeekableInputStream stream = input.newStream()) {
        for (int position : new int[] {0, 7_000_000, 300}) {
          stream.seek(position);
          check(stream.read() == (position & 0x7f), "the byte at " + position);
        }
      }
      check(StreamSupport.stream(io.listPrefix(table + "/").spliterator(), false).count() == 2, "two files are listed");
      List<String> many = new ArrayList<>();
      for (int i = 0; i < 5; i++) {
        many.add(table + "/metadata/f-" + i);
        write(io, many.get(i), 10);
      }
      io.deleteFiles(many);
      io.deleteFile(small);
      check(!io.newInputFile(small).exists(), "the deleted file is gone");
      check(!io.newInputFile(many.get(3)).exists(), "the files deleted together are gone");
      boolean refused = false;
      try {
        io.newInputFile(args[1]).getLength();
      } catch (RuntimeException expected) {
        refused = true;
      }
      check(refused, "another table's file is refused");
    }
    System.out.println("ALL DONE");
  }

  private static void write(S3FileIO io, String location, int length) throws Exception {
    byte[] bytes = new byte[length];
    for (int i = 0; i < length; i++) {
      bytes[i] = (byte) (i & 0x7f);
    }
    try (PositionOutputStream out = io.newOutputFile(location).createOrOverwrite()) {
      out.write(bytes);
    }
  }

  private static void check(boolean holds, String what) {
    if (!holds) {
      throw new IllegalStateException("not so: " + what);
    }
    System.out.println(what);
  }
}
