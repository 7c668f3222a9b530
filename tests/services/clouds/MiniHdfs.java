import java.util.concurrent.CountDownLatch;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** Runs a NameNode and a DataNode in one process until it is ended. Arguments: the port of the NameNode, and a folder. */
public final class MiniHdfs {
  public static void main(String[] arguments) throws Exception {
    Configuration configuration = new Configuration();
    configuration.set("hdfs.minidfs.basedir", arguments[1]);
    configuration.set("dfs.namenode.fs-limits.min-block-size", "1024");
    new MiniDFSCluster.Builder(configuration)
        .nameNodePort(Integer.parseInt(arguments[0]))
        .nameNodeHttpPort(0)
        .numDataNodes(1)
        .build()
        .waitActive();
    System.out.println("HDFS is active");
    new CountDownLatch(1).await();
  }
}
