import com.ibm.icu.lang.UCharacter;
import com.ibm.icu.lang.UCharacterCategory;
import com.ibm.icu.util.ULocale;
import java.util.LinkedHashSet;
import java.util.Locale;
import java.util.Set;
import java.util.StringJoiner;

/** Prints the case mappings of each code point by the JDK and by ICU, in the locales that have rules of their own. */
public class CaseMappings {
    private static final String[] LOCALES = {"", "tr", "az", "lt", "el", "hy", "nl"};

    public static void main(String[] arguments) {
        StringBuilder lines = new StringBuilder();
        for (int point = 0; point <= Character.MAX_CODE_POINT; point++) {
            if (point >= Character.MIN_SURROGATE && point <= Character.MAX_SURROGATE) {
                continue;
            }
            boolean unassigned = UCharacter.getType(point) == UCharacterCategory.UNASSIGNED;
            Set<String> mapped = unassigned ? Set.of() : mappings(point);
            if (unassigned || !mapped.isEmpty()) {
                StringJoiner texts = new StringJoiner(",");
                mapped.forEach(text -> texts.add(hex(text)));
                lines.append(hex(Character.toString(point))).append('\t');
                lines.append(unassigned ? "unassigned" : texts).append('\n');
            }
        }
        System.out.print(lines);
    }

    private static Set<String> mappings(int point) {
        String text = Character.toString(point);
        Set<String> mapped = new LinkedHashSet<>();
        mapped.add(Character.toString(Character.toLowerCase(point)));
        mapped.add(Character.toString(Character.toUpperCase(point)));
        mapped.add(Character.toString(UCharacter.toLowerCase(point)));
        mapped.add(Character.toString(UCharacter.toUpperCase(point)));
        for (String name : LOCALES) {
            Locale locale = name.isEmpty() ? Locale.ROOT : Locale.forLanguageTag(name);
            mapped.add(text.toLowerCase(locale));
            mapped.add(text.toUpperCase(locale));
            mapped.add(UCharacter.toLowerCase(new ULocale(name), text));
            mapped.add(UCharacter.toUpperCase(new ULocale(name), text));
        }
        mapped.remove(text);
        return mapped;
    }

    private static String hex(String text) {
        StringJoiner points = new StringJoiner(" ");
        text.codePoints().forEach(point -> points.add(Integer.toHexString(point)));
        return points.toString();
    }
}
