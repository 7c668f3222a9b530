/** Starts Trino from plain jars, as the image's launcher does from its archive. Run as a source file: `java TrinoMain.java`. */
public class TrinoMain
{
    public static void main(String[] args)
    {
        new io.trino.server.Server().start("483");
    }
}
