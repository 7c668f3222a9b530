import io.airlift.slice.Slice;
import io.airlift.slice.Slices;
import io.trino.spi.Plugin;
import io.trino.spi.spool.SpooledLocation;
import io.trino.spi.spool.SpooledLocation.DirectLocation;
import io.trino.spi.spool.SpooledSegmentHandle;
import io.trino.spi.spool.SpoolingContext;
import io.trino.spi.spool.SpoolingManager;
import io.trino.spi.spool.SpoolingManagerContext;
import io.trino.spi.spool.SpoolingManagerFactory;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.UUID;

/**
 * Stores spooled results in files of one folder. Clients fetch them through the coordinator. Trino's own manager, which
 * stores them in object storage, is only in the archive of the server, and in no Maven repository.
 */
public class LocalSpooling
        implements Plugin
{
    @Override
    public Iterable<SpoolingManagerFactory> getSpoolingManagerFactories()
    {
        return List.of(new Factory());
    }

    private static class Factory
            implements SpoolingManagerFactory
    {
        @Override
        public String getName()
        {
            return "local";
        }

        @Override
        public SpoolingManager create(Map<String, String> config, SpoolingManagerContext context)
        {
            return new Manager(Path.of(config.get("folder")));
        }
    }

    private record Segment(String identifier, String encoding, Instant expirationTime)
            implements SpooledSegmentHandle
    {
        Segment(String identifier, String encoding)
        {
            this(identifier, encoding, Instant.now().plusSeconds(3600));
        }
    }

    private record Manager(Path folder)
            implements SpoolingManager
    {
        private Path file(SpooledSegmentHandle segment)
        {
            return folder.resolve(segment.identifier());
        }

        @Override
        public SpooledSegmentHandle create(SpoolingContext context)
        {
            return new Segment(UUID.randomUUID().toString(), context.encoding());
        }

        @Override
        public OutputStream createOutputStream(SpooledSegmentHandle segment)
                throws IOException
        {
            return Files.newOutputStream(file(segment));
        }

        @Override
        public InputStream openInputStream(SpooledSegmentHandle segment)
                throws IOException
        {
            return Files.newInputStream(file(segment));
        }

        @Override
        public void acknowledge(SpooledSegmentHandle segment)
                throws IOException
        {
            Files.delete(file(segment));
        }

        @Override
        public Optional<DirectLocation> directLocation(SpooledSegmentHandle segment)
        {
            return Optional.empty();
        }

        @Override
        public SpooledLocation location(SpooledSegmentHandle segment)
        {
            return SpooledLocation.coordinatorLocation(Slices.utf8Slice(segment.identifier() + " " + segment.encoding()), Map.of());
        }

        @Override
        public SpooledSegmentHandle handle(Slice identifier, Map<String, List<String>> headers)
        {
            String[] parts = identifier.toStringUtf8().split(" ");
            return new Segment(parts[0], parts[1]);
        }

        @Override
        public boolean isRecoverableException(IOException exception)
        {
            return false;
        }
    }
}
