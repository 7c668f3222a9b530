import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.hadoop.conf.Configuration;
import org.apache.parquet.crypto.keytools.KeyToolkit;
import org.apache.parquet.crypto.keytools.KmsClient;

/** Wraps keys as connector/parquet/encryption/kms.py does; the master keys are in the configuration, as name:number. */
public class LocalKms implements KmsClient {
  private Configuration configuration;

  @Override
  public void initialize(Configuration configuration, String id, String url, String token) {
    this.configuration = configuration;
  }

  private byte[] master(String name) {
    byte[] key = new byte[16];
    Arrays.fill(key, (byte) configuration.getInt("test.master." + name, 0));
    return key;
  }

  @Override
  public String wrapKey(byte[] key, String name) {
    return KeyToolkit.encryptKeyLocally(key, master(name), name.getBytes(StandardCharsets.UTF_8));
  }

  @Override
  public byte[] unwrapKey(String wrapped, String name) {
    return KeyToolkit.decryptKeyLocally(wrapped, master(name), name.getBytes(StandardCharsets.UTF_8));
  }
}
