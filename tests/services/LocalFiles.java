import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * Hadoop's local files. Without Hadoop's native library, its own class starts the program chmod for each file and each
 * folder that it makes.
 */
public class LocalFiles
        extends LocalFileSystem
{
    public LocalFiles()
    {
        super(new Raw());
    }

    private static class Raw
            extends RawLocalFileSystem
    {
        @Override
        public void setPermission(Path path, FsPermission permission)
                throws IOException
        {
            String text = permission.getUserAction().SYMBOL + permission.getGroupAction().SYMBOL + permission.getOtherAction().SYMBOL;
            Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(text));
        }
    }
}
