import java.nio.ByteBuffer;
import java.util.List;
import java.util.Map;
import java.util.stream.LongStream;
import org.apache.iceberg.Files;
import org.apache.iceberg.deletes.Deletes;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.puffin.Blob;
import org.apache.iceberg.puffin.BlobMetadata;
import org.apache.iceberg.puffin.Puffin;
import org.apache.iceberg.puffin.PuffinCompressionCodec;
import org.apache.iceberg.puffin.PuffinReader;
import org.apache.iceberg.puffin.PuffinWriter;
import org.apache.iceberg.util.ByteBuffers;
import org.apache.iceberg.util.Pair;

/**
 * Reads and writes Puffin files with Iceberg's own library. `read FILE` prints a line for each blob. `write FILE` writes a
 * deletion vector and a blob that is compressed with zstd.
 */
public class PuffinPeer {
  public static void main(String[] args) throws Exception {
    if (args[0].equals("read")) {
      read(args[1]);
    } else {
      write(args[1]);
    }
  }

  private static void read(String file) throws Exception {
    try (PuffinReader reader = Puffin.read(Files.localInput(file)).build()) {
      System.out.println(reader.fileMetadata().properties());
      for (Pair<BlobMetadata, ByteBuffer> blobWithData : reader.readAll(reader.fileMetadata().blobs())) {
        BlobMetadata blob = blobWithData.first();
        byte[] data = ByteBuffers.toByteArray(blobWithData.second());
        System.out.println(
            String.join(
                "|",
                blob.type(),
                blob.inputFields().toString(),
                blob.snapshotId() + "," + blob.sequenceNumber(),
                blob.properties().toString(),
                java.util.HexFormat.of().formatHex(data)));
      }
    }
  }

  private static void write(String file) throws Exception {
    CloseableIterable<Long> positions =
        CloseableIterable.withNoopClose(() -> LongStream.of(3, 5, 1_000_000, 5_000_000_000L).iterator());
    try (PuffinWriter writer = Puffin.write(Files.localOutput(file)).createdBy("PuffinPeer").build()) {
      writer.add(
          new Blob(
              "deletion-vector-v1",
              List.of(2147483645),
              -1,
              -1,
              Deletes.toPositionIndex(positions).serialize(),
              null,
              Map.of("referenced-data-file", "file:/data.parquet", "cardinality", "4")));
      writer.add(
          new Blob(
              "text-v1",
              List.of(1, 2),
              11,
              12,
              ByteBuffer.wrap("text ".repeat(100).getBytes()),
              PuffinCompressionCodec.ZSTD,
              Map.of()));
    }
  }
}
