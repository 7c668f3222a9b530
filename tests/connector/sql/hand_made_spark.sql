WITH s AS (FROM {db}.sales VERSION AS OF {old}) SELECT count(*) FROM s WHERE id > 200
WITH s AS (FROM {db}.sales VERSION AS OF {old}) SELECT id FROM s WHERE id = 131
WITH s AS (FROM {db}.sales VERSION AS OF {old}) SELECT id, note FROM s WHERE id IN (8, 44)
WITH s AS (TABLE {db}.sales) SELECT id FROM s WHERE id = 131
WITH s AS (FROM {db}.sales VERSION AS OF {old}), t AS (FROM s) SELECT t.id, u.note FROM t JOIN {db}.sales u ON t.id = u.id WHERE u.id IN (8, 44)
WITH s AS (FROM {db}.sales VERSION AS OF {old}) SELECT a.id, b.id FROM s a JOIN s b ON a.id = b.id WHERE a.id = 44
WITH sales AS (SELECT * FROM {db}.sales WHERE id < 90) SELECT id FROM sales WHERE id > 80
WITH items AS (SELECT 44 AS i_id, 'red' AS color) SELECT s.id FROM {db}.sales s JOIN items ON s.id = items.i_id
WITH x AS (SELECT id FROM {db}.sales WHERE id < 50), y AS (WITH x AS (SELECT id FROM {db}.sales WHERE id > 40) SELECT id FROM x) SELECT x.id FROM x JOIN y ON x.id = y.id
WITH x AS (SELECT id, item FROM {db}.sales) SELECT id FROM x WHERE item = 3 UNION ALL SELECT id FROM x WHERE item = 11 EXCEPT SELECT id FROM x WHERE id = 44
SELECT s.id FROM {db}.sales s WHERE s.id > (SELECT max(t.id) - 5 FROM {db}.sales t WHERE t.item = s.item) AND s.item BETWEEN 3 AND 5
SELECT s.id FROM {db}.sales s WHERE s.store = (SELECT max(t.s_id) FROM {db}.stores t WHERE t.opened = s.day)
SELECT s.id, (SELECT count(*) FROM {db}.items i WHERE i.i_id = s.item AND i.color = 'red') AS n FROM {db}.sales s WHERE s.id BETWEEN 40 AND 60
SELECT s.id FROM {db}.sales s WHERE (SELECT count(*) FROM {db}.items i WHERE i.i_id = s.item AND i.color = 'red') = 0 AND s.id < 60
SELECT s.id FROM {db}.sales s WHERE s.item NOT IN (SELECT brand FROM {db}.items WHERE color = 'red') AND s.id < 100
SELECT s.id FROM {db}.sales s WHERE s.item NOT IN (SELECT IF(i_id = 3, NULL, brand) FROM {db}.items)
SELECT s.id FROM {db}.sales s WHERE (s.item, s.store) NOT IN (SELECT i_id, CAST(size AS bigint) FROM {db}.items) AND s.id < 50
SELECT s.id FROM {db}.sales s WHERE (s.item, s.store) IN (SELECT i_id, CAST(size AS bigint) FROM {db}.items WHERE size < 5)
SELECT s.id FROM {db}.sales s WHERE s.item NOT IN (1, NULL)
SELECT s.id FROM {db}.sales s WHERE NOT (s.item NOT IN (1, NULL))
SELECT s.id FROM {db}.sales s WHERE s.item NOT BETWEEN NULL AND 5
SELECT s.id FROM {db}.sales s WHERE s.item BETWEEN NULL AND 5 OR s.id = 44
SELECT s.id FROM {db}.sales s WHERE NOT (s.item BETWEEN 5 AND 3) AND s.id < 20
SELECT s.id, i.color FROM {db}.sales s LEFT JOIN {db}.items i ON s.item = i.i_id AND i.color = 'red' WHERE s.id BETWEEN 30 AND 60
SELECT s.id, i.color FROM {db}.sales s LEFT JOIN {db}.items i ON s.item = i.i_id AND s.id > 100 WHERE s.id BETWEEN 90 AND 110
SELECT s.id, i.color FROM {db}.sales s LEFT JOIN {db}.items i ON s.item = i.i_id WHERE i.color <=> NULL AND s.id < 60
SELECT s.id, i.color FROM {db}.sales s RIGHT JOIN {db}.items i ON s.item = i.i_id AND s.id = 44 WHERE i.i_id < 5
SELECT s.id, i.i_id FROM {db}.sales s FULL JOIN {db}.items i ON s.item = i.i_id AND s.id < 20 WHERE i.size > 17 OR s.id = 3
SELECT s.id, i.i_id FROM {db}.sales s FULL JOIN {db}.items i ON s.item = i.i_id WHERE i.size > 17
SELECT s.id FROM {db}.sales s LEFT ANTI JOIN {db}.items i ON s.item = i.i_id AND s.id > 30 WHERE s.id < 60
SELECT s.id FROM {db}.sales s LEFT SEMI JOIN {db}.items i ON s.item = i.i_id AND i.color = 'red' AND s.id > 30
SELECT k, a.id, b.w FROM {db}.a FULL JOIN {db}.b USING (k) WHERE k = 4
SELECT k, a.id, b.w FROM {db}.a RIGHT JOIN {db}.b USING (k) WHERE k = 4 AND a.id > 16
SELECT a.k, b.k, k FROM {db}.a LEFT JOIN {db}.b USING (k) WHERE b.k IS NULL AND a.id > 10
SELECT * FROM {db}.b NATURAL JOIN {db}.c WHERE k = 1
SELECT k, s, n FROM {db}.c NATURAL FULL JOIN {db}.e WHERE k > 2
SELECT k, count(*) FROM {db}.a FULL JOIN {db}.c USING (k) GROUP BY k HAVING k = 5 OR k IS NULL
SELECT id FROM {db}.sales WHERE item = 3 UNION SELECT i_id FROM {db}.items WHERE color = 'red' INTERSECT SELECT size FROM {db}.items WHERE size > 3
(SELECT id FROM {db}.sales WHERE id < 20 MINUS SELECT i_id FROM {db}.items) UNION ALL SELECT b_id FROM {db}.brands WHERE b_id = 3
SELECT q.x FROM (SELECT item AS x FROM {db}.sales UNION ALL SELECT store FROM {db}.sales) q WHERE q.x = 15
SELECT id FROM (SELECT id, item, rank() OVER (PARTITION BY item ORDER BY id DESC) AS r FROM {db}.sales) WHERE r = 1 AND item IN (3, 4)
SELECT id FROM (SELECT id, item, sum(id) OVER (PARTITION BY item ORDER BY id ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) AS t FROM {db}.sales) WHERE id = 44
SELECT id, l FROM (SELECT id, item, lag(id) OVER (ORDER BY id) AS l FROM {db}.sales) WHERE item = 4
SELECT item, count(*) OVER w FROM {db}.sales WHERE id < 30 WINDOW w AS (PARTITION BY item)
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item), (store), ()) HAVING item = 3 OR n > 100
SELECT * FROM (SELECT item, store, grouping_id() AS g, count(*) AS n FROM {db}.sales GROUP BY CUBE (item, store)) WHERE item = 3 AND g = 1
SELECT item, sum(id) FROM {db}.sales GROUP BY ROLLUP (item) HAVING item IS NULL
SELECT item, GROUPING(item), sum(id) FROM {db}.sales WHERE id < 50 GROUP BY ROLLUP (item) HAVING GROUPING(item) = 1
SELECT item, max(id) FROM {db}.sales GROUP BY ALL HAVING item = 7
SELECT id, e FROM {db}.sales LATERAL VIEW explode(array(3, item)) t AS e WHERE e = 3 AND id < 60
SELECT id, e FROM {db}.sales LATERAL VIEW OUTER explode(CAST(array() AS array<int>)) t AS e WHERE id = 44
SELECT id, e FROM {db}.sales LATERAL VIEW OUTER explode(array(3, 4)) t AS e WHERE e <=> item AND id < 100
SELECT id, p, e FROM {db}.sales LATERAL VIEW posexplode(array(8, 44)) t AS p, e WHERE id = e
SELECT id, x.e FROM {db}.sales, LATERAL explode(sequence(item, item + 1)) AS x(e) WHERE x.e = 4
SELECT s.id, q.c FROM {db}.sales s, LATERAL (SELECT color AS c FROM {db}.items i WHERE i.i_id = s.item ORDER BY i.size LIMIT 1) q WHERE q.c = 'red' AND s.id < 60
SELECT s.id, q.m FROM {db}.sales s LEFT JOIN LATERAL (SELECT max(size) AS m FROM {db}.items i WHERE i.i_id = s.item) q ON q.m > 4 WHERE s.id < 80
SELECT q.* FROM {db}.items i JOIN LATERAL (SELECT s.id, i.size FROM {db}.sales s WHERE s.item = i.i_id AND s.id > 100) q WHERE i.color = 'red'
SELECT ID, NoTe FROM {db}.sales WHERE iD = 44 AND nOTE = 'red'
SELECT S.ID FROM {db}.sales s JOIN {db}.items AS I ON s.ITEM = i.I_ID WHERE i.COLOR = 'red'
SELECT `id`, `s`.`note` AS `a``b.c` FROM {db}.`sales` `s` WHERE `s`.`id` = 44
SELECT id FROM {db}.sales WHERE info.CODE = 3
SELECT info.code, count(*) FROM {db}.sales GROUP BY info.code HAVING info.code IN (3, 4)
SELECT id FROM {db}.sales WHERE info = named_struct('code', 3, 'tag', 'a1')
SELECT id FROM {db}.sales WHERE info IS NULL AND id < 60
SELECT id FROM {db}.sales WHERE info.code IS NULL AND id < 60
SELECT id FROM {db}.sales WHERE info.code <=> NULL OR info.code = 99
SELECT id FROM {db}.sales WHERE NOT (info.code > 2)
SELECT id FROM {db}.sales WHERE coalesce(info.code, 3) = 3
SELECT i.code, id FROM (SELECT info AS i, id FROM {db}.sales) WHERE i.code = 3 AND i.tag > 'a0'
SELECT id, c FROM (SELECT id, struct(item AS c, store AS d) AS st FROM {db}.sales) LATERAL VIEW explode(array(st.c)) x AS c WHERE st.c = 3
SELECT id FROM {db}.sales WHERE at = TIMESTAMP'2026-01-01 12:10:00 Europe/Berlin'
SELECT id FROM {db}.sales WHERE at >= TIMESTAMP'2026-01-01 20:00:00-08:00' AND at < '2026-01-02 05:00:00+01:00'
SELECT id FROM {db}.sales WHERE CAST(at AS date) = '2026-01-02'
SELECT id FROM {db}.sales WHERE CAST(at AS string) = '2026-01-01 05:38:00'
SELECT id FROM {db}.sales WHERE to_utc_timestamp(at, 'America/New_York') < TIMESTAMP'2026-01-01 06:00:00'
SELECT id FROM {db}.sales WHERE from_utc_timestamp(at, 'Asia/Tokyo') = TIMESTAMP'2026-01-01 14:38:00'
SELECT id FROM {db}.sales WHERE nt < TIMESTAMP'2026-01-01 06:00:00' AND nt = CAST(nt AS timestamp)
SELECT id FROM {db}.sales WHERE nt BETWEEN TIMESTAMP_NTZ'2026-01-03 00:00:00' AND TIMESTAMP_NTZ'2026-01-03 03:00:00'
SELECT id FROM {db}.sales WHERE nt = at
SELECT id FROM {db}.sales WHERE nt > DATE'2026-01-03' AND nt < DATE'2026-01-04'
SELECT id FROM {db}.sales WHERE at < DATE'2026-01-01' + INTERVAL '5' HOUR
SELECT id FROM {db}.sales WHERE hour(nt) = 3 AND id < 60
SELECT id FROM {db}.sales WHERE unix_timestamp(at) < 1767230000
SELECT id FROM {db}.sales WHERE day > DATE'0001-01-01' AND day < DATE'1582-10-04' OR id = 44
SELECT id FROM {db}.sales WHERE day > '1582-10-10' AND day < '2026-01-03'
SELECT id FROM {db}.sales WHERE date_add(day, -800000) < DATE'-0100-01-01'
SELECT id FROM {db}.sales WHERE datediff(day, DATE'2026-01-10') = 2
SELECT id FROM {db}.sales WHERE months_between(day, DATE'2026-01-01') = 1
SELECT id FROM {db}.sales WHERE add_months(day, 1) = DATE'2026-02-28'
SELECT id FROM {db}.sales WHERE last_day(day) = DATE'2026-01-31' AND dayofweek(day) = 1
SELECT id FROM {db}.sales WHERE make_date(2026, 1, 15) = day
SELECT id FROM {db}.sales WHERE day = to_date('20260115', 'yyyyMMdd')
SELECT id FROM {db}.sales WHERE weekofyear(day) = 3 AND extract(YEAR FROM day) = 2026
SELECT id FROM {db}.sales WHERE day IN ('2026-01-05', '2026-01-20', NULL)
SELECT s FROM {db}.a WHERE s LIKE 'b!%c' ESCAPE '!'
SELECT s FROM {db}.a WHERE s LIKE 'b!%%' ESCAPE '!'
SELECT s FROM {db}.a WHERE s LIKE 'b\\%%'
SELECT s FROM {db}.a WHERE s LIKE 'b\%c'
SELECT s FROM {db}.a WHERE s NOT LIKE 'a%' AND s NOT LIKE '%e%'
SELECT s FROM {db}.a WHERE s ILIKE 'STRA%'
SELECT s FROM {db}.a WHERE s LIKE ANY ('a%', 'b%')
SELECT s FROM {db}.a WHERE s LIKE ALL ('a%', '%b')
SELECT s FROM {db}.a WHERE s NOT LIKE ALL ('a%', '%b')
SELECT s FROM {db}.a WHERE s RLIKE '^a.?$'
SELECT s FROM {db}.a WHERE s = 'a '
SELECT s FROM {db}.a WHERE rtrim(s) = 'a'
SELECT s FROM {db}.a WHERE s COLLATE UTF8_LCASE = 'b'
SELECT s FROM {db}.a WHERE s COLLATE UNICODE_CI = 'É'
SELECT s FROM {db}.a WHERE s = 'B' COLLATE UTF8_LCASE
SELECT s, count(*) FROM (SELECT s COLLATE UTF8_LCASE AS s FROM {db}.a) GROUP BY s HAVING s = 'B'
SELECT a.s, b.s FROM {db}.a JOIN {db}.b ON a.s COLLATE UTF8_LCASE = b.s WHERE b.s = 'A'
SELECT s FROM {db}.a WHERE collate(s, 'UTF8_LCASE') LIKE 'STRA%'
SELECT s FROM {db}.a WHERE s COLLATE UTF8_BINARY_RTRIM = 'a'
SELECT id FROM {db}.a WHERE p = 2.505
SELECT id FROM {db}.a WHERE p = CAST(2.5 AS float)
SELECT id FROM {db}.a WHERE p > 9999999999.99
SELECT id FROM {db}.a WHERE p * 100 = 250
SELECT id FROM {db}.a WHERE p + 0.005 > 2.5 AND p < 1e1
SELECT id FROM {db}.a WHERE p = '2.5'
SELECT id FROM {db}.a WHERE CAST(p AS int) = 2
SELECT id FROM {db}.a WHERE round(p) = 3
SELECT id FROM {db}.a WHERE p IN (2.5, 3.750, 3.751)
SELECT id FROM {db}.a WHERE f = 0.1
SELECT id FROM {db}.a WHERE f = 0.1F
SELECT id FROM {db}.a WHERE f < 0.1D
SELECT id FROM {db}.a WHERE f = CAST('NaN' AS float)
SELECT id FROM {db}.a WHERE v = 0 OR v = CAST('Infinity' AS double)
SELECT id FROM {db}.a WHERE v > 1.5
SELECT id FROM {db}.a WHERE v >= 'NaN'
SELECT id FROM {db}.a WHERE NOT (v <= 1.5)
SELECT id FROM {db}.a WHERE v <> v OR v = v
SELECT id FROM {db}.a WHERE v = -0.0D
SELECT id FROM {db}.a WHERE v IN (0.0D, double('NaN'))
SELECT a.id, b.id FROM {db}.a JOIN {db}.b ON a.v = b.v WHERE b.w = 2
SELECT a.id, b.id FROM {db}.a JOIN {db}.b ON a.v = b.v AND a.k = 1
SELECT id FROM {db}.a WHERE v = (SELECT max(v) FROM {db}.b)
SELECT a.id, b.id FROM {db}.a JOIN {db}.b ON a.p = b.p
SELECT a.id FROM {db}.a WHERE a.p IN (SELECT p FROM {db}.b)
SELECT id FROM {db}.a WHERE k = 3000000000
SELECT id FROM {db}.a WHERE k < 3000000000 AND k > -3000000000
SELECT id FROM {db}.a WHERE CAST(k AS tinyint) = 2
SELECT id FROM {db}.a WHERE CAST(id AS int) = 5
SELECT id FROM {db}.a WHERE k = '2'
SELECT id FROM {db}.a WHERE k = ' 2 '
SELECT id FROM {db}.a WHERE k = 2.0
SELECT id FROM {db}.a WHERE k IN (1, '2', 3.0)
SELECT id FROM {db}.a WHERE ok = 'true'
SELECT id FROM {db}.a WHERE ok > false
SELECT id FROM {db}.a WHERE ok IS NOT TRUE AND id < 9
SELECT id FROM {db}.a WHERE NOT ok
SELECT id FROM {db}.a WHERE id % 5 = 0 AND id DIV 5 = 2
SELECT id FROM {db}.a WHERE id & 3 = 1 AND id < 10
SELECT id FROM {db}.a WHERE id = 9223372036854775807 OR id > 20
SELECT id FROM {db}.a WHERE try_add(id, 9223372036854775800) > 5
SELECT id FROM {db}.a WHERE id - 1 < 5 AND abs(id - 3) < 2
SELECT id FROM {db}.a WHERE z = TIMESTAMP'2020-03-01 07:00:00' OR z < '2020-03-01'
SELECT id FROM {db}.a WHERE ts = TIMESTAMP_NTZ'2020-02-28 18:00:00.000001'
SELECT id FROM {db}.a WHERE ts = TIMESTAMP_LTZ'2020-02-28 18:00:00.000001'
SELECT id FROM {db}.a WHERE date(ts) = DATE'2020-02-29' AND date(z) > DATE'2020-03-01'
SELECT id FROM {db}.a WHERE date_trunc('WEEK', d) = DATE'2020-02-03'
SELECT id FROM {db}.a WHERE trunc(d, 'Q') = '2020-01-01'
SELECT id FROM {db}.a WHERE decode(k, 1, 'x', 2, 'y') = 'y'
SELECT id FROM {db}.a WHERE nvl(k, 3) = 3 AND nvl2(s, k, 0) > 1
SELECT id FROM {db}.a WHERE greatest(k, 3) = 3 AND least(id, 10) = 10
SELECT id FROM {db}.a WHERE if(k IS NULL, 1, k) = 1
SELECT id FROM {db}.a WHERE zeroifnull(k) = 0
SELECT id FROM {db}.a WHERE nullifzero(k) IS NULL
SELECT id FROM {db}.a WHERE isnull(k) OR k <=> 2
SELECT id FROM {db}.a WHERE isnotnull(k) AND NOT (k <=> 2)
SELECT id FROM {db}.a WHERE equal_null(k, NULL)
SELECT id FROM {db}.a WHERE array(1, 2)[k % 2] = 2
SELECT id FROM {db}.a WHERE map(1, 'x')[k] = 'x'
SELECT id FROM {db}.a WHERE exists(array(1, 5), x -> x = k)
SELECT id FROM {db}.a WHERE array_contains(array(1, NULL), k)
SELECT id FROM {db}.a WHERE NOT array_contains(array(1, NULL), k)
SELECT id FROM {db}.a WHERE arrays_overlap(array(k), array(1, 2))
SELECT x.id FROM {db}.a x WHERE EXISTS (SELECT 1 FROM {db}.a y WHERE y.k = x.k AND y.id = x.id + 1) AND x.k <> 2
SELECT x.id FROM {db}.a x WHERE NOT EXISTS (SELECT 1 FROM {db}.b y WHERE y.k <=> x.k)
SELECT x.id FROM {db}.a x WHERE EXISTS (SELECT 1 FROM {db}.b y WHERE y.k = 99) OR x.k = 1
SELECT x.id FROM {db}.a x WHERE x.k IN (SELECT y.k FROM {db}.b y WHERE y.id = x.id) OR x.id = 3
SELECT x.id FROM {db}.a x WHERE x.k = (SELECT y.k FROM {db}.b y WHERE y.id = x.id)
SELECT x.id FROM {db}.a x WHERE x.k > (SELECT avg(y.k) FROM {db}.b y WHERE y.s = x.s) OR x.s IS NULL
SELECT (SELECT first(n) FROM {db}.c WHERE c.k = a.k), a.id FROM {db}.a WHERE a.k = 2
SELECT count_if((SELECT max(n) FROM {db}.c WHERE c.k = a.k) = 'two') FROM {db}.a
SELECT count(*) FILTER (WHERE k = 2), any_value(k) FILTER (WHERE k = 5) FROM {db}.a
SELECT count(*) FILTER (WHERE k = 2 AND NOT ok), collect_list(id) FILTER (WHERE k = 1) FROM {db}.a
SELECT bool_or(k = 2), max(IF(k = 1, id, NULL)) FROM {db}.a
SELECT max(IF(k = 1, id, NULL)), min(IF(k = 1, NULL, id)) FROM {db}.a
SELECT percentile(k, 0.5) FILTER (WHERE id < 9), max_by(id, v) FILTER (WHERE id < 9) FROM {db}.a
SELECT approx_count_distinct(k) FILTER (WHERE id < 9) FROM {db}.a
SELECT count(DISTINCT k, s) FILTER (WHERE id < 9), sum(DISTINCT k) FILTER (WHERE id > 20) FROM {db}.a
SELECT * FROM (SELECT k, s, id FROM {db}.a WHERE k < 3) PIVOT (sum(id) AS t FOR s IN ('a', 'ab', NULL))
SELECT * FROM {db}.a UNPIVOT (val FOR col IN (id, k)) WHERE col = 'k' AND val = 3
SELECT * FROM {db}.a UNPIVOT INCLUDE NULLS (val FOR col IN (id, k)) WHERE val IS NULL
FROM {db}.a |> WHERE k = 2 |> AGGREGATE sum(id) AS t GROUP BY s |> WHERE t > 9
FROM {db}.a |> EXTEND k + 1 AS k1 |> WHERE k1 = 3 |> DROP v |> SELECT id, k1
FROM {db}.a |> SET k = k * 2 |> WHERE k = 4 |> SELECT id, k
FROM {db}.a |> AS q |> JOIN {db}.c ON q.k = c.k |> WHERE c.n = 'two' |> SELECT q.id
FROM {db}.a |> ORDER BY id |> LIMIT 5 |> WHERE k = 1 |> SELECT id
FROM {db}.a |> UNION ALL (SELECT * FROM {db}.a WHERE k = 1) |> WHERE id = 5 |> SELECT id
SELECT k AS id, id AS k FROM {db}.a WHERE k = 3 ORDER BY k LIMIT 2
SELECT id AS a, a + 1 AS b, b * 2 AS c FROM {db}.a WHERE id = 5
SELECT q.x FROM (SELECT k AS x, k + 0 AS y FROM {db}.a) q WHERE q.y = 2 AND q.x = 2
SELECT id FROM (SELECT * FROM {db}.a ORDER BY id NULLS LAST LIMIT 6 OFFSET 2) WHERE k = 1
SELECT id FROM (SELECT * FROM {db}.a LIMIT 100) WHERE k = 1
SELECT DISTINCT k FROM {db}.a WHERE k > (SELECT min(k) FROM {db}.c) SORT BY k
SELECT /*+ BROADCAST(c), COALESCE(1) */ a.id FROM {db}.a JOIN {db}.c ON a.k = c.k WHERE c.n = 'two'
SELECT /*+ REPARTITION(3, k) */ * FROM {db}.a WHERE k = 2
SELECT id, rand(3) < 2 FROM {db}.a WHERE k = 2
SELECT id FROM {db}.a WHERE rand(3) < 2 AND k = 2
SELECT id FROM (SELECT id, k, monotonically_increasing_id() >= 0 AS m FROM {db}.a) WHERE k = 2 AND m
SELECT id, _row_id, _last_updated_sequence_number FROM {db}.sales WHERE id IN (44, 131, 200)
SELECT id, _file, _pos, _spec_id, _partition FROM {db}.sales WHERE id IN (44, 131, 200)
SELECT id, _deleted FROM {db}.sales WHERE id IN (28, 44)
SELECT id, input_file_name() LIKE '%parquet' FROM {db}.sales WHERE id = 44
SELECT * EXCEPT (note, info) FROM {db}.sales WHERE id = 44
SELECT t.*, s.id FROM {db}.stores t JOIN {db}.sales s ON s.day = t.opened AND s.store = t.s_id
SELECT s.id FROM {db}.sales s JOIN {db}.stores t ON s.day = t.opened + INTERVAL '1' DAY WHERE t.city = 'c3'
SELECT s.id FROM {db}.sales s JOIN {db}.stores t ON s.day BETWEEN t.opened AND t.opened + 1 WHERE t.city = 'c3'
SELECT s.id FROM {db}.sales s JOIN {db}.stores t ON year(s.day) = year(t.opened) AND month(s.day) = month(t.opened) WHERE t.city = 'c3' AND s.id < 50
SELECT s.id FROM {db}.sales s JOIN {db}.items i ON s.item = i.i_id JOIN {db}.brands b ON i.brand = b.b_id AND b.b_name = 'a1' WHERE i.color IS NOT NULL OR b.b_id IS NULL
SELECT s.id FROM {db}.sales s LEFT JOIN ({db}.items i JOIN {db}.brands b ON i.brand = b.b_id) ON s.item = i.i_id WHERE b.b_name = 'a1' AND s.id < 80
SELECT s.id FROM {db}.sales s LEFT JOIN {db}.items i ON s.item = i.i_id LEFT JOIN {db}.brands b ON i.brand = b.b_id WHERE coalesce(b.b_name, 'a1') = 'a1' AND s.id BETWEEN 30 AND 80
SELECT a.id FROM {db}.sales a, {db}.sales b, {db}.sales c WHERE a.id = b.item AND b.id = c.item AND c.id = 44
SELECT v.k, s.id FROM VALUES (3, 'x'), (NULL, 'y') AS v(k, l) LEFT JOIN {db}.sales s ON s.item = v.k AND s.id < 60
SELECT v.k, s.id FROM VALUES (3), (NULL) AS v(k) JOIN {db}.sales s ON s.item <=> v.k WHERE s.id < 60
SELECT s.id FROM {db}.sales s JOIN VALUES (3.0), (4.5) AS v(k) ON s.item = v.k
SELECT s.id FROM {db}.sales s JOIN range(40, 46) r ON s.id = r.id
SELECT s.id FROM {db}.sales s WHERE s.id IN (SELECT id FROM range(40, 46)) AND s.note = 'red'
SELECT s.id FROM {db}.sales s WHERE s.id IN (SELECT explode(sequence(40, 46)))
SELECT CASE WHEN id = 44 THEN (SELECT max(i_id) FROM {db}.items) ELSE 0 END FROM {db}.sales WHERE id BETWEEN 43 AND 45
SELECT id FROM {db}.sales WHERE item = (SELECT max(i_id) FROM {db}.items WHERE size = 99)
SELECT id FROM {db}.sales WHERE item = (SELECT i_id FROM {db}.items WHERE size = 7) OR id = 3
SELECT id FROM {db}.sales WHERE xxhash64(id) = xxhash64(44L)
SELECT id FROM {db}.sales WHERE concat(note, id) = 'red44'
SELECT id FROM {db}.sales WHERE note || 'x' = 'redx' AND id < 99
SELECT id FROM {db}.sales WHERE trim(note) = 'red' AND length(note) = 3
SELECT id FROM {db}.sales WHERE substring(note, -2) = 'ed' AND id < 50
SELECT id FROM {db}.sales WHERE substring(note, 2, 2) = 'ed' AND id < 50
SELECT id FROM {db}.sales WHERE note = 'red' AND note <> 'red' OR id = 5
SELECT id FROM {db}.sales WHERE id = 5 OR NULL
SELECT id FROM {db}.sales WHERE NOT (id <> 5 OR NULL)
SELECT id FROM {db}.sales WHERE (id = 5) = (item = 0)
SELECT id FROM {db}.sales WHERE (id = 5) <=> NULL AND id < 9
SELECT id FROM {db}.sales WHERE CASE WHEN id < 5 THEN item = 0 WHEN id > 230 THEN NULL END
SELECT id FROM {db}.sales WHERE weight = 0 AND id < 70
SELECT id FROM {db}.sales WHERE weight > 3
SELECT id FROM {db}.sales WHERE weight <= -0.0D AND id < 70
SELECT id FROM {db}.sales WHERE isnan(weight) AND id < 70
SELECT id FROM {db}.sales WHERE nanvl(weight, 1) = 1 AND id < 100
SELECT id FROM {db}.sales WHERE price = 5.5 OR price = 5.504
SELECT id FROM {db}.sales WHERE price BETWEEN 5.4999 AND 5.5001
SELECT id FROM {db}.sales WHERE price / 2 = 2.75
SELECT id FROM {db}.sales WHERE price = 5.5BD AND price < 1E3
SELECT id FROM {db}.sales WHERE CAST(price AS decimal(4,1)) = 5.5
SELECT id FROM {db}.sales WHERE CAST(price AS double) = 5.5D
SELECT id FROM {db}.sales WHERE CAST(item AS double) < 0.5D AND CAST(id AS float) = 3F
SELECT id FROM {db}.sales WHERE CAST(id AS string) LIKE '4_'
SELECT id FROM {db}.sales WHERE try_cast(substr(note, 2) AS int) = 3
SELECT id FROM {db}.sales WHERE item IN (SELECT i_id FROM {db}.items i WHERE EXISTS (SELECT 1 FROM {db}.brands b WHERE b.b_id = i.brand AND b.b_name = 'a2'))
SELECT id FROM {db}.sales WHERE item IN (SELECT i_id FROM {db}.items i WHERE NOT EXISTS (SELECT 1 FROM {db}.brands b WHERE b.b_id = i.brand AND b.b_name > 'a2'))
SELECT id FROM {db}.sales WHERE item NOT IN (SELECT i_id FROM {db}.items i WHERE EXISTS (SELECT 1 FROM {db}.brands b WHERE b.b_id = i.brand AND b.b_name > 'a2'))
SELECT id FROM {db}.sales s WHERE EXISTS (SELECT 1 FROM {db}.items i WHERE i.i_id = s.item AND i.brand = (SELECT max(b.b_id) FROM {db}.brands b WHERE b.b_name = concat('a', i.brand) AND b.b_id < 3))
SELECT id FROM {db}.sales s WHERE NOT EXISTS (SELECT 1 FROM {db}.items i WHERE i.i_id = s.item AND (SELECT count(*) FROM {db}.brands b WHERE b.b_id = i.brand AND b.b_id < 3) = 0) AND id < 90
SELECT id FROM {db}.sales s WHERE s.item IN (SELECT i_id FROM {db}.items i WHERE (SELECT count(*) FROM {db}.brands b WHERE b.b_id = i.brand AND b.b_id > 5) = 0)
SELECT id FROM {db}.sales s WHERE s.item IN (SELECT i_id FROM {db}.items i WHERE (SELECT sum(b.b_id) FROM {db}.brands b WHERE b.b_id = i.brand AND b.b_id > 5) IS NULL)
SELECT id FROM {db}.sales s WHERE s.item IN (SELECT i_id FROM {db}.items i WHERE i.size > (SELECT avg(j.size) FROM {db}.items j WHERE j.brand = i.brand AND j.color = 'red'))
SELECT id FROM {db}.sales s WHERE s.id = (SELECT max(t.id) FROM {db}.sales t WHERE t.item = s.item AND t.id < (SELECT max(u.id) FROM {db}.sales u WHERE u.item = t.item)) AND s.item < 9
SELECT id FROM {db}.sales s WHERE s.item IN (SELECT i_id FROM {db}.items i WHERE i.brand IN (SELECT b_id FROM {db}.brands b WHERE b.b_name = 'a1' AND b.b_id <= i.size))
SELECT id FROM {db}.sales s WHERE s.item IN (SELECT i_id FROM {db}.items i WHERE i.brand NOT IN (SELECT b_id FROM {db}.brands b WHERE b.b_id > i.size)) AND s.id < 120
SELECT i_id, (SELECT max(s.id) FROM {db}.sales s WHERE s.item = i.i_id AND s.store = (SELECT min(t.s_id) FROM {db}.stores t WHERE t.s_id = s.store AND t.city > 'c2')) FROM {db}.items i
SELECT i_id FROM {db}.items i WHERE (SELECT count(*) FROM {db}.sales s WHERE s.item = i.i_id AND s.id IN (SELECT u.id FROM {db}.sales u WHERE u.note = 'red')) > 0
SELECT i_id FROM {db}.items i WHERE (SELECT count(*) FILTER (WHERE s.note = 'red') FROM {db}.sales s WHERE s.item = i.i_id) = 0
SELECT i_id, (SELECT count(*) FILTER (WHERE s.note = 'red') FROM {db}.sales s WHERE s.item = i.i_id) AS n FROM {db}.items i
SELECT i_id, (SELECT sum(CASE WHEN s.note = 'red' THEN 1 END) + 0 FROM {db}.sales s WHERE s.item = i.i_id) AS n FROM {db}.items i
SELECT i_id FROM {db}.items i WHERE (SELECT coalesce(sum(s.id), 0) FROM {db}.sales s WHERE s.item = i.i_id AND s.id > 200) = 0
SELECT i_id FROM {db}.items i WHERE i_id = (SELECT count(*) FROM {db}.brands b WHERE b.b_id < i.brand)
SELECT i_id FROM {db}.items i WHERE (i.i_id, i.brand) IN (SELECT s.item, s.item DIV 3 FROM {db}.sales s WHERE s.id > 200 AND s.store IN (SELECT t.s_id FROM {db}.stores t WHERE t.s_id = s.store))
SELECT s.id FROM {db}.sales s LEFT JOIN {db}.items i ON s.item = i.i_id AND EXISTS (SELECT 1 FROM {db}.brands b WHERE b.b_id = 3) WHERE i.i_id IS NULL AND s.id < 50
SELECT s.id FROM {db}.sales s LEFT JOIN {db}.items i ON s.item = i.i_id AND i.brand IN (SELECT b_id FROM {db}.brands WHERE b_name = 'a1') WHERE s.id < 60 AND i.i_id IS NULL
SELECT s.id FROM {db}.sales s JOIN {db}.items i ON s.item = i.i_id AND i.brand NOT IN (SELECT b_id FROM {db}.brands WHERE b_name > 'a1')
SELECT s.id, CASE WHEN s.item IN (SELECT i_id FROM {db}.items WHERE color = 'red') THEN 1 ELSE 0 END AS r FROM {db}.sales s WHERE s.id < 60
SELECT count(*), max(i) FROM (SELECT s.id AS i FROM {db}.sales s WHERE s.item IN (SELECT i_id FROM {db}.items WHERE color = 'red')) HAVING count(*) > 3
SELECT s.item, count(*) FROM {db}.sales s GROUP BY s.item HAVING s.item IN (SELECT i_id FROM {db}.items WHERE color = 'red')
SELECT s.item, max(s.id) AS m FROM {db}.sales s GROUP BY s.item HAVING max(s.id) = (SELECT max(t.id) FROM {db}.sales t WHERE t.item = 7)
SELECT * FROM (SELECT s.item, max(s.id) AS m FROM {db}.sales s GROUP BY s.item) q JOIN {db}.sales s ON s.id = q.m WHERE q.item IN (3, 4)
SELECT q.m FROM (SELECT max(id) AS m FROM {db}.sales WHERE item = 3 UNION ALL SELECT max(id) FROM {db}.sales WHERE item = 99) q
SELECT x.id FROM (SELECT id, item FROM {db}.sales EXCEPT SELECT id, item FROM {db}.sales WHERE id > 50) x WHERE x.item IN (SELECT i_id FROM {db}.items WHERE size = 3)
SELECT x.id FROM (SELECT id, item FROM {db}.sales EXCEPT ALL SELECT id, item FROM {db}.sales WHERE item = 3) x WHERE x.item = 3 OR x.id = 0
SELECT x.id FROM (SELECT id, item FROM {db}.sales INTERSECT SELECT id, item FROM {db}.sales WHERE id < 50) x WHERE x.item = 3
SELECT * FROM (SELECT store, count(*) AS n FROM {db}.sales WHERE id < 100 GROUP BY store) NATURAL JOIN (SELECT s_id AS store, city FROM {db}.stores WHERE city < 'c3')
SELECT id FROM {db}.sales, {db}.items WHERE item = i_id AND (color = 'red' OR color IS NULL) AND NOT (size > 5)
SELECT id FROM {db}.sales, {db}.items WHERE item = i_id AND (color = 'red' AND size < 5 OR id = 7)
SELECT id FROM {db}.sales LEFT JOIN {db}.items ON item = i_id WHERE (color = 'red' AND size < 5) OR (id = 7 AND color IS NULL) OR id = 17
SELECT id FROM {db}.sales LEFT JOIN {db}.items ON item = i_id WHERE coalesce(size, 4) = 4
SELECT id FROM {db}.sales LEFT JOIN {db}.items ON item = i_id WHERE NOT (size = 4) AND id < 70
SELECT id FROM {db}.sales s LEFT JOIN {db}.items i ON s.item <=> i.i_id WHERE s.id < 40 AND i.i_id IS NULL
SELECT s.id FROM {db}.sales s JOIN {db}.items i ON s.item = i.i_id AND s.item = 3 JOIN {db}.stores t ON t.s_id = i.i_id
SELECT s.id FROM {db}.sales s JOIN {db}.items i ON s.item + 1 = i.i_id WHERE i.color = 'red' AND s.id < 90
SELECT s.id FROM {db}.sales s JOIN {db}.items i ON CAST(s.item AS string) = CAST(i.i_id AS string) WHERE i.size = 3
SELECT s.id FROM {db}.sales s JOIN {db}.items i ON s.item = i.i_id OR s.store = i.i_id WHERE i.size = 3
SELECT s.id FROM {db}.sales s JOIN {db}.items i ON s.price = i.i_id WHERE i.size = 3
SELECT s.id FROM {db}.sales s JOIN {db}.brands b ON s.note = b.b_name WHERE b.b_id = 3
SELECT s.id FROM {db}.sales s JOIN {db}.brands b ON upper(s.note) = upper(b.b_name) WHERE b.b_id = 3
SELECT s.id FROM {db}.sales s JOIN {db}.brands b ON s.note LIKE concat(b.b_name, '%') WHERE b.b_id = 3
SELECT s.id, v FROM {db}.sales s LATERAL VIEW explode(map('a', item, 'b', 5)) t AS k, v WHERE v = 3 AND k = 'a'
SELECT id FROM {db}.sales WHERE id = 44;
SELECT /* FROM {db}.sales s WHERE */ id FROM /* x */ {db}.sales /* y */ s /* z */ WHERE s.id = 44
SELECT ((id)) FROM (({db}.sales)) WHERE ((id) = (44))
SELECT id FROM ({db}.sales s JOIN {db}.items i ON s.item = i.i_id) WHERE i.color = 'red'
SELECT x.id FROM ({db}.sales) x WHERE x.id = 44
SELECT x.a FROM ({db}.sales) AS x (a, b, c, d, e, f, g, h, i, j, k) WHERE x.a = 44
SELECT id FROM {db}.sales WHERE array(1, 2, 3)[1] = item
SELECT id FROM {db}.sales WHERE (SELECT true) AND id = 44
SELECT id FROM {db}.sales WHERE EXISTS (SELECT 1 FROM {db}.items WHERE color = 'nope') OR id = 44
SELECT id FROM {db}.sales WHERE EXISTS (SELECT 1 FROM {db}.items WHERE color = 'red') AND id = 44
SELECT id FROM {db}.sales WHERE NOT EXISTS (SELECT 1 FROM {db}.items WHERE color = 'nope') AND id = 44
SELECT first_value(id) OVER (PARTITION BY item ORDER BY id), id FROM {db}.sales WHERE item IN (SELECT i_id FROM {db}.items WHERE size = 3)
SELECT * FROM (SELECT id, item, store, row_number() OVER (PARTITION BY item, store ORDER BY id) r, count(*) OVER (PARTITION BY item) c FROM {db}.sales) WHERE item = 3 AND r = 1
SELECT * FROM (SELECT id, item, store, row_number() OVER (PARTITION BY item, store ORDER BY id) r, count(*) OVER (PARTITION BY item) c FROM {db}.sales) WHERE store = 3 AND item > 15
SELECT * FROM (SELECT weight, count(*) OVER (PARTITION BY weight) c FROM {db}.sales) WHERE weight = 0
SELECT weight, count(*) FROM {db}.sales GROUP BY weight HAVING weight = 0 OR isnan(weight)
SELECT DISTINCT weight FROM {db}.sales WHERE weight < 1
SELECT a.id FROM (SELECT DISTINCT id, item FROM {db}.sales) a JOIN (SELECT DISTINCT item FROM {db}.sales WHERE id = 44) b ON a.item = b.item
SELECT max(day), min(day) FROM {db}.sales WHERE day >= (SELECT min(opened) FROM {db}.stores) AND day <= (SELECT max(opened) FROM {db}.stores)
SELECT id FROM {db}.sales WHERE day = (SELECT max(opened) FROM {db}.stores) - INTERVAL 1 DAY
SELECT id FROM {db}.sales WHERE (day, store) IN (SELECT opened, s_id FROM {db}.stores)
SELECT id FROM {db}.sales WHERE item IN (3, (SELECT max(i_id) FROM {db}.items WHERE size < 2))
SELECT id FROM {db}.sales WHERE item BETWEEN (SELECT min(i_id) FROM {db}.items WHERE color = 'blue') AND 4
SELECT sum(x) FROM (SELECT id AS x FROM {db}.sales WHERE item = 3 UNION SELECT -id FROM {db}.sales WHERE item = 3) HAVING sum(x) = 0
SELECT count(*) FROM {db}.sales WHERE 1 = 0
SELECT max(id) FROM {db}.sales WHERE 1 = 0 OR id IS NULL
SELECT id FROM {db}.sales ORDER BY (SELECT max(i_id) FROM {db}.items), id LIMIT 3
SELECT id FROM {db}.sales WHERE id < 10 ORDER BY note DESC NULLS LAST, id LIMIT 3 OFFSET 2
SELECT id FROM {db}.sales WHERE note IN (SELECT b_name FROM {db}.brands ORDER BY b_id LIMIT 2) AND id < 100
SELECT id FROM {db}.sales WHERE item IN (SELECT brand FROM {db}.items GROUP BY brand HAVING count(*) > 2 AND max(size) < 9)
SELECT id FROM {db}.sales WHERE item IN (SELECT min(i_id) FROM {db}.items GROUP BY GROUPING SETS ((brand), (color)))
SELECT id FROM {db}.sales WHERE item IN (SELECT i_id FROM {db}.items WHERE color = 'red' UNION ALL SELECT b_id FROM {db}.brands)
SELECT id FROM {db}.sales WHERE item IN (SELECT coalesce(i_id, 3) FROM {db}.items RIGHT JOIN {db}.brands ON brand = b_id AND size = 4)
SELECT id FROM {db}.sales WHERE item IN (SELECT i_id FROM {db}.items FULL JOIN {db}.brands ON brand = b_id AND size = 4)
SELECT i.i_id, q.n FROM {db}.items i, LATERAL (SELECT count(*) AS n FROM {db}.sales s WHERE s.item = i.i_id AND s.note = 'red') q WHERE q.n = 0
SELECT i.i_id, q.n FROM {db}.items i, LATERAL (SELECT count(*) FILTER (WHERE s.note = 'red') AS n FROM {db}.sales s WHERE s.item = i.i_id) q
SELECT i.i_id, q.id FROM {db}.items i LEFT JOIN LATERAL (SELECT s.id FROM {db}.sales s WHERE s.item = i.i_id AND s.note = 'red') q WHERE i.size < 6
SELECT i.i_id, q.id FROM {db}.items i LEFT JOIN LATERAL (SELECT s.id FROM {db}.sales s WHERE s.item = i.i_id AND s.note = 'red') q ON q.id > 40 WHERE q.id IS NULL
SELECT i.i_id, q.id, p.id FROM {db}.items i, LATERAL (SELECT s.id, s.store FROM {db}.sales s WHERE s.item = i.i_id AND s.id < 100) q, LATERAL (SELECT t.s_id AS id FROM {db}.stores t WHERE t.s_id = q.store AND t.city = 'c3') p WHERE i.color = 'red'
SELECT i.i_id, q.x FROM {db}.items i, LATERAL (SELECT i.size + 1 AS x) q WHERE q.x = 4
SELECT i.i_id, q.id FROM {db}.items i, LATERAL (SELECT s.id FROM {db}.sales s WHERE s.item = i.i_id UNION ALL SELECT t.s_id FROM {db}.stores t WHERE t.s_id = i.size) q WHERE i.i_id = 3
SELECT i.i_id, q.id FROM {db}.items i, LATERAL (SELECT s.id FROM {db}.sales s WHERE s.item < i.i_id AND s.id > 200 - i.size ORDER BY s.id LIMIT 2) q
SELECT i.i_id, q.id FROM {db}.items i, LATERAL (SELECT s.id FROM {db}.sales s WHERE s.item = i.i_id AND s.id IN (SELECT max(u.id) FROM {db}.sales u WHERE u.item = s.item)) q WHERE i.size BETWEEN 3 AND 5
SELECT id, x.e FROM {db}.sales s JOIN LATERAL explode(array(3, 4)) AS x(e) ON x.e = s.item WHERE s.id < 90
SELECT s.id FROM {db}.sales s WHERE s.item IN (SELECT i.i_id FROM {db}.items i, LATERAL (SELECT b.b_name FROM {db}.brands b WHERE b.b_id = i.brand) q WHERE q.b_name = 'a1')
SELECT a.id, q.n FROM {db}.a CROSS JOIN LATERAL (SELECT n FROM {db}.c WHERE c.k = a.k) q WHERE a.id > 5
SELECT a.id, q.n FROM {db}.a LEFT JOIN LATERAL (SELECT max(n) AS n FROM {db}.c WHERE c.k = a.k) q ON TRUE WHERE a.k = 1
SELECT a.id, q.n FROM {db}.a CROSS JOIN LATERAL (SELECT count(*) AS n FROM {db}.c WHERE c.k = a.k AND c.n = 'one') q WHERE q.n = 0
SELECT a.id FROM {db}.a JOIN {db}.b b ON a.id = b.id CROSS JOIN LATERAL (SELECT k FROM {db}.c WHERE c.k = b.k) q WHERE q.k = 2
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item), (store), ()) HAVING item = 3 OR store = 4
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item), (store), ()) HAVING item = 3
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item), (store), ()) HAVING item = 3 AND store IS NULL
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item), (store), ()) HAVING coalesce(item, 3) = 3
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item), (store), ()) HAVING item <=> NULL AND store = 4
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item, store), (item)) HAVING item IS NULL
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY GROUPING SETS ((item, store), (item)) HAVING coalesce(item, 3) = 3 AND store IS NULL
SELECT item, store, count(*) AS n FROM {db}.sales GROUP BY item, ROLLUP (store) HAVING item IN (3, 4) AND NOT (store = 4)
SELECT * FROM (SELECT item, store, grouping_id() AS g, count(*) AS n FROM {db}.sales GROUP BY CUBE (item, store)) WHERE item = 3 OR (store = 4 AND item IS NULL)
SELECT item, sum(id) FROM {db}.sales GROUP BY ROLLUP (item) HAVING item IS NOT NULL AND item > 15
SELECT item, sum(id), count(DISTINCT store), max(item) FROM {db}.sales GROUP BY ROLLUP (item) HAVING item = 3
SELECT q.item, q.s, i.color FROM (SELECT item, sum(id) AS s FROM {db}.sales GROUP BY ROLLUP (item)) q JOIN {db}.items i ON q.item = i.i_id WHERE i.color = 'red'
SELECT q.item, q.s, i.color FROM (SELECT item, sum(id) AS s FROM {db}.sales GROUP BY ROLLUP (item)) q LEFT JOIN {db}.items i ON q.item = i.i_id AND i.color = 'red' WHERE q.item < 4 OR q.item IS NULL
SELECT info.code, note, count(*) FROM {db}.sales GROUP BY CUBE (info.code, note) HAVING info.code = 3
SELECT q.d, q.n FROM (SELECT day AS d, count(*) AS n FROM {db}.sales GROUP BY ROLLUP (day)) q WHERE year(q.d) = 2026 AND month(q.d) = 2
SELECT info, count(*) FROM {db}.sales GROUP BY ROLLUP (info) HAVING info.code = 3
SELECT note, item, count(*) FROM {db}.sales GROUP BY GROUPING SETS ((note), (item)) HAVING note LIKE 're%' OR item = 5
SELECT note, item, count(*) FROM {db}.sales GROUP BY GROUPING SETS ((note), (item)) HAVING NOT (note LIKE 'a%') AND note <> 'x'
SELECT item, item AS j, count(*) FROM {db}.sales GROUP BY GROUPING SETS ((item), (j)) HAVING j = 3
SELECT item, count(*) FROM {db}.sales WHERE 1 = 0 GROUP BY GROUPING SETS ((item), ())
SELECT * FROM {db}.a UNPIVOT (val FOR col IN (v)) WHERE k = 3
SELECT * FROM {db}.a UNPIVOT INCLUDE NULLS (val FOR col IN (v)) WHERE k = 3 AND val IS NULL
SELECT * FROM {db}.a UNPIVOT ((x, y) FOR col IN ((id, k), (k, id))) WHERE x = 3
SELECT k, s, count(*) FROM {db}.a GROUP BY CUBE (k, s) HAVING k = 2 AND grouping(s) = 1
SELECT v, count(*) FROM {db}.a GROUP BY ROLLUP (v) HAVING v = 0 OR v IS NULL
SELECT v, count(*) FROM {db}.a GROUP BY ROLLUP (v) HAVING v > 1
SELECT ok, count(*) FROM {db}.a GROUP BY ROLLUP (ok) HAVING ok
SELECT ok, count(*) FROM {db}.a GROUP BY ROLLUP (ok) HAVING NOT ok
SELECT ok, count(*) FROM {db}.a GROUP BY ROLLUP (ok) HAVING ok IS NOT TRUE
SELECT id FROM {db}.sales WHERE (item, store) IN ((3, 4L), (7, CAST(NULL AS bigint)))
SELECT id FROM {db}.sales WHERE (item, store) NOT IN ((3, 4L), (7, CAST(NULL AS bigint))) AND id < 90
SELECT id FROM {db}.sales WHERE NOT ((item, store) IN ((3, 4L), (0, CAST(NULL AS bigint))) OR id > 90)
