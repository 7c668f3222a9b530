import java.math.BigDecimal;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.ResultSetMetaData;
import java.sql.SQLException;
import java.util.Properties;

/**
 * Runs statements with Trino's JDBC driver. Its arguments are the URL and, for each statement, its text, the number of
 * its parameters, and the parameters, such as {@code bigint:1} or {@code varchar:x}. For each statement, it prints the
 * columns, the rows and an empty line.
 */
public class JdbcClient
{
    public static void main(String[] args)
            throws SQLException
    {
        Properties properties = new Properties();
        properties.setProperty("user", "tests");
        try (Connection connection = DriverManager.getConnection(args[0], properties)) {
            for (int next = 1; next < args.length; ) {
                try (PreparedStatement statement = connection.prepareStatement(args[next])) {
                    int parameters = Integer.parseInt(args[next + 1]);
                    for (int number = 1; number <= parameters; number++) {
                        bind(statement, number, args[next + 1 + number]);
                    }
                    next += 2 + parameters;
                    try (ResultSet rows = statement.executeQuery()) {
                        print(rows);
                    }
                }
            }
        }
        System.exit(0); // Otherwise the threads of the driver would delay the end for a minute.
    }

    private static void bind(PreparedStatement statement, int number, String typeAndValue)
            throws SQLException
    {
        String value = typeAndValue.substring(typeAndValue.indexOf(':') + 1);
        switch (typeAndValue.substring(0, typeAndValue.indexOf(':'))) {
            case "bigint" -> statement.setLong(number, Long.parseLong(value));
            case "decimal" -> statement.setBigDecimal(number, new BigDecimal(value));
            default -> statement.setString(number, value);
        }
    }

    private static void print(ResultSet rows)
            throws SQLException
    {
        ResultSetMetaData columns = rows.getMetaData();
        StringBuilder line = new StringBuilder();
        for (int number = 1; number <= columns.getColumnCount(); number++) {
            line.append(columns.getColumnLabel(number)).append(' ').append(columns.getColumnTypeName(number)).append('\t');
        }
        System.out.println(line);
        while (rows.next()) {
            line = new StringBuilder();
            for (int number = 1; number <= columns.getColumnCount(); number++) {
                line.append(rows.getString(number)).append('\t');
            }
            System.out.println(line);
        }
        System.out.println();
    }
}
