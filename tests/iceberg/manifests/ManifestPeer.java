import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URI;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Paths;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.iceberg.ContentFile;
import org.apache.iceberg.DataFile;
import org.apache.iceberg.DeleteFile;
import org.apache.iceberg.Files;
import org.apache.iceberg.ManifestContent;
import org.apache.iceberg.ManifestFile;
import org.apache.iceberg.ManifestFiles;
import org.apache.iceberg.PartitionSpec;
import org.apache.iceberg.TableMetadata;
import org.apache.iceberg.TableMetadataParser;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.io.FileIO;
import org.apache.iceberg.io.InputFile;
import org.apache.iceberg.io.OutputFile;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.node.ArrayNode;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.iceberg.types.Conversions;
import org.apache.iceberg.types.Type;
import org.apache.iceberg.util.ByteBuffers;

/**
 * Reads manifests with Iceberg's own library. For each line of the input, which is the URI of a metadata file, it prints a
 * line of JSON that describes the manifests of the current snapshot.
 */
public class ManifestPeer {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final FileIO IO = new LocalIO();

  public static void main(String[] args) throws Exception {
    BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    for (String line = requests.readLine(); line != null; line = requests.readLine()) {
      TableMetadata metadata = TableMetadataParser.read(IO, line);
      ArrayNode manifests = JSON.createArrayNode();
      for (ManifestFile manifest : metadata.currentSnapshot().allManifests(IO)) {
        describeManifest(manifest, manifests.addObject(), metadata);
      }
      answers.println(manifests);
    }
    answers.flush();
  }

  private static void describeManifest(ManifestFile manifest, ObjectNode out, TableMetadata metadata) throws Exception {
    out.put("manifest_path", manifest.path());
    out.put("manifest_length", manifest.length());
    out.put("partition_spec_id", manifest.partitionSpecId());
    out.put("content", manifest.content().id());
    out.put("sequence_number", manifest.sequenceNumber());
    out.put("min_sequence_number", manifest.minSequenceNumber());
    out.put("added_snapshot_id", manifest.snapshotId());
    out.put("added_files_count", manifest.addedFilesCount());
    out.put("existing_files_count", manifest.existingFilesCount());
    out.put("deleted_files_count", manifest.deletedFilesCount());
    out.put("added_rows_count", manifest.addedRowsCount());
    out.put("existing_rows_count", manifest.existingRowsCount());
    out.put("deleted_rows_count", manifest.deletedRowsCount());
    out.put("first_row_id", manifest.firstRowId());
    if (manifest.partitions() != null) {
      ArrayNode partitions = out.putArray("partitions");
      for (ManifestFile.PartitionFieldSummary summary : manifest.partitions()) {
        ObjectNode summaryDocument = partitions.addObject();
        summaryDocument.put("null", summary.containsNull());
        summaryDocument.put("nan", summary.containsNaN());
        summaryDocument.put("lower", encodeHex(summary.lowerBound()));
        summaryDocument.put("upper", encodeHex(summary.upperBound()));
      }
    }
    ArrayNode files = out.putArray("files");
    PartitionSpec spec = metadata.specsById().get(manifest.partitionSpecId());
    if (manifest.content() == ManifestContent.DATA) {
      try (CloseableIterable<DataFile> read = ManifestFiles.read(manifest, IO, metadata.specsById())) {
        for (DataFile file : read) {
          ObjectNode document = files.addObject();
          describeFile(file, document, spec);
          document.put("first_row_id", file.firstRowId());
        }
      }
    } else {
      try (CloseableIterable<DeleteFile> read =
          ManifestFiles.readDeleteManifest(manifest, IO, metadata.specsById())) {
        for (DeleteFile file : read) {
          ObjectNode document = files.addObject();
          describeFile(file, document, spec);
          document.put("referenced_data_file", file.referencedDataFile());
          document.put("content_offset", file.contentOffset());
          document.put("content_size_in_bytes", file.contentSizeInBytes());
        }
      }
    }
  }

  private static void describeFile(ContentFile<?> file, ObjectNode out, PartitionSpec spec) {
    out.put("content", file.content().id());
    out.put("file_path", file.location());
    out.put("file_format", file.format().toString());
    out.put("spec_id", file.specId());
    ArrayNode partition = out.putArray("partition");
    for (int i = 0; i < spec.fields().size(); i += 1) {
      Type type = spec.partitionType().fields().get(i).type();
      Object value = file.partition().get(i, Object.class);
      partition.add(value == null ? null : encodeHex(Conversions.toByteBuffer(type, value)));
    }
    out.put("record_count", file.recordCount());
    out.put("file_size_in_bytes", file.fileSizeInBytes());
    putCounts(out, "column_sizes", file.columnSizes());
    putCounts(out, "value_counts", file.valueCounts());
    putCounts(out, "null_value_counts", file.nullValueCounts());
    putCounts(out, "nan_value_counts", file.nanValueCounts());
    putBounds(out, "lower_bounds", file.lowerBounds());
    putBounds(out, "upper_bounds", file.upperBounds());
    out.put("key_metadata", encodeHex(file.keyMetadata()));
    putNumbers(out, "split_offsets", file.splitOffsets());
    putNumbers(out, "equality_ids", file.equalityFieldIds());
    out.put("sort_order_id", file.sortOrderId());
    out.put("sequence_number", file.dataSequenceNumber());
    out.put("file_sequence_number", file.fileSequenceNumber());
  }

  private static void putCounts(ObjectNode out, String name, Map<Integer, Long> valueByColumn) {
    if (valueByColumn != null) {
      ObjectNode values = out.putObject(name);
      new TreeMap<>(valueByColumn).forEach((column, count) -> values.put(column.toString(), count));
    }
  }

  private static void putBounds(ObjectNode out, String name, Map<Integer, ByteBuffer> valueByColumn) {
    if (valueByColumn != null) {
      ObjectNode values = out.putObject(name);
      new TreeMap<>(valueByColumn).forEach((column, bound) -> values.put(column.toString(), encodeHex(bound)));
    }
  }

  private static void putNumbers(ObjectNode out, String name, List<? extends Number> numbers) {
    if (numbers != null) {
      ArrayNode values = out.putArray(name);
      numbers.forEach(number -> values.add(number.longValue()));
    }
  }

  private static String encodeHex(ByteBuffer bytes) {
    return bytes == null ? null : HexFormat.of().formatHex(ByteBuffers.toByteArray(bytes));
  }

  private static class LocalIO implements FileIO {
    @Override
    public InputFile newInputFile(String location) {
      return Files.localInput(Paths.get(URI.create(location)).toFile());
    }

    @Override
    public OutputFile newOutputFile(String location) {
      throw new UnsupportedOperationException("a peer only reads: " + location);
    }

    @Override
    public void deleteFile(String location) {
      throw new UnsupportedOperationException("a peer only reads: " + location);
    }
  }
}
