SELECT a.id, b.id, c.k FROM db.a, db.b RIGHT JOIN db.c ON b.k = c.k
SELECT a.id, b.id, c.k FROM db.a, db.b FULL JOIN db.c ON b.k = c.k WHERE a.id < 3
SELECT count(*), count(a.id), count(c.k) FROM db.e AS a, db.b b RIGHT JOIN db.c c ON b.k = c.k
SELECT a.id, b.id, c.n FROM db.a, db.b LEFT JOIN db.c ON b.k = c.k WHERE a.id = b.id
SELECT a.id, n FROM db.a, db.b JOIN db.c USING (k) WHERE a.id < 2
SELECT a.id FROM db.a WHERE a.k NOT IN (SELECT b.k FROM db.b)
SELECT a.id FROM db.a WHERE a.k NOT IN (SELECT b.k FROM db.b WHERE b.k IS NOT NULL)
SELECT a.id FROM db.a WHERE a.k NOT IN (SELECT e.k FROM db.e)
SELECT a.id FROM db.a WHERE NOT (a.k IN (SELECT c.k FROM db.c WHERE c.k IS NOT NULL))
SELECT a.id FROM db.a WHERE a.k IN (SELECT c.k FROM db.c) OR a.id = 1
SELECT a.id FROM db.a WHERE EXISTS (SELECT 1 FROM db.b WHERE b.k = a.k) OR a.id = 23
SELECT a.id FROM db.a WHERE NOT EXISTS (SELECT 1 FROM db.b WHERE b.k = a.k AND b.w = 2)
SELECT a.id FROM db.a WHERE EXISTS (SELECT 1 FROM db.b WHERE b.k = a.k AND b.w = 2) AND NOT EXISTS (SELECT 1 FROM db.c WHERE c.k = a.k AND c.n = 'one')
SELECT a.id FROM db.a WHERE EXISTS (SELECT count(*) FROM db.b WHERE b.k = a.k)
SELECT a.id FROM db.a WHERE EXISTS (SELECT count(*) FROM db.b WHERE b.k = a.k HAVING count(*) > 1)
SELECT a.id FROM db.a WHERE EXISTS (SELECT b.k FROM db.b WHERE b.k = a.k GROUP BY b.k HAVING count(*) > 2)
SELECT a.id, (SELECT count(*) FROM db.b WHERE b.k = a.k) FROM db.a
SELECT a.id, (SELECT count(*) FROM db.b WHERE b.k = a.k AND b.w > 1) AS n FROM db.a WHERE a.id < 9
SELECT a.id FROM db.a WHERE (SELECT count(*) FROM db.b WHERE b.k = a.k) = 0
SELECT a.id FROM db.a WHERE a.k = (SELECT max(b.k) FROM db.b)
SELECT a.id FROM db.a WHERE a.k = (SELECT min(b.k) FROM db.b WHERE b.w = 3 AND b.s = 'A')
SELECT a.id FROM db.a WHERE a.k = (SELECT max(b.k) FROM db.b WHERE b.id = a.id)
SELECT a.id FROM db.a WHERE a.p > (SELECT avg(b.p) FROM db.b)
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k AND c.n = 'one'
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k WHERE c.n = 'one'
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k WHERE c.n IS NULL
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k WHERE c.n IS NULL AND a.k > 2
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k WHERE coalesce(c.n, 'x') = 'x'
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k WHERE c.n IS DISTINCT FROM 'one'
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k WHERE NOT (c.n = 'one')
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k WHERE NOT (c.n = 'one' AND a.id > 3)
SELECT a.id, c.n FROM db.a RIGHT JOIN db.c ON a.k = c.k WHERE a.id = 5 OR a.id IS NULL
SELECT a.id, c.n FROM db.a RIGHT JOIN db.c ON a.k = c.k AND a.id > 10
SELECT a.id, c.n FROM db.a FULL JOIN db.c ON a.k = c.k WHERE a.id > 10 OR c.n = 'four'
SELECT a.id, c.n FROM db.a FULL JOIN db.c ON a.k = c.k WHERE a.id > 10 AND c.n = 'four'
SELECT a.id, c.n FROM db.a FULL JOIN db.c ON a.k = c.k AND a.id > 10 AND c.n = 'four'
SELECT a.id, b.w, c.n FROM db.a LEFT JOIN db.b ON a.id = b.id LEFT JOIN db.c ON b.k = c.k WHERE c.n = 'two' OR b.w IS NULL
SELECT a.id, b.w, c.n FROM db.a LEFT JOIN (db.b JOIN db.c ON b.k = c.k) ON a.id = b.id AND c.n = 'two'
SELECT a.id, b.w, c.n FROM db.a LEFT JOIN (db.b LEFT JOIN db.c ON b.k = c.k) ON a.id = b.id WHERE c.n = 'two'
SELECT a.id, b.w FROM db.a JOIN db.b ON a.id = b.id RIGHT JOIN db.c ON b.k = c.k WHERE c.k >= 2
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k AND a.k = 2
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON a.k = c.k AND a.k = 2 WHERE a.k IN (1, 2)
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON FALSE
SELECT a.id, c.n FROM db.a LEFT JOIN db.c ON TRUE WHERE a.id = 1
SELECT k, count(*) FROM db.a FULL JOIN db.c USING (k) GROUP BY k
SELECT k, n FROM db.a RIGHT JOIN db.c USING (k) WHERE k = 4
SELECT k, n FROM db.a LEFT JOIN db.c USING (k) WHERE k = 5
SELECT k, n FROM db.a FULL JOIN db.c USING (k) WHERE k = 4
SELECT k, a.id, b.id FROM db.a LEFT JOIN db.b USING (k) WHERE k = 4 AND b.w = 1
SELECT * FROM db.c LEFT JOIN db.b USING (k)
SELECT c.*, b.w FROM db.c JOIN db.b ON c.k = b.k AND c.s = b.s
SELECT x.k, y.k FROM db.c x, db.c y WHERE x.k = y.k + 1
SELECT x.k, y.n FROM db.c x JOIN db.c y ON x.k = y.k WHERE x.n = 'one'
SELECT k FROM db.c UNION SELECT k FROM db.b
SELECT k FROM db.c UNION ALL SELECT w FROM db.b WHERE w = 2
SELECT q.k FROM (SELECT k FROM db.c UNION ALL SELECT w FROM db.b) q WHERE q.k = 2
SELECT q.k FROM (SELECT k FROM db.a UNION ALL SELECT k FROM db.b) q WHERE q.k = 2
SELECT q.k FROM (SELECT k FROM db.a EXCEPT SELECT k FROM db.c) q WHERE q.k > 2
SELECT q.k FROM (SELECT k FROM db.b INTERSECT SELECT k FROM db.c) q WHERE q.k > 2
SELECT k FROM db.a INTERSECT SELECT k FROM db.c EXCEPT SELECT w FROM db.b
SELECT k FROM db.a UNION SELECT w FROM db.b INTERSECT SELECT k FROM db.c
SELECT k FROM db.a EXCEPT ALL SELECT k FROM db.c
SELECT k FROM db.a INTERSECT ALL SELECT k FROM db.c
(SELECT k FROM db.a ORDER BY k DESC LIMIT 2) UNION ALL (SELECT k FROM db.c ORDER BY k LIMIT 1)
SELECT q.x FROM (SELECT p AS x FROM db.a UNION ALL SELECT p FROM db.b) q WHERE q.x = 1.5
SELECT q.x FROM (SELECT p AS x FROM db.a UNION ALL SELECT k FROM db.b) q WHERE q.x = 2
SELECT q.x FROM (SELECT v AS x FROM db.a UNION ALL SELECT p FROM db.b) q WHERE q.x = 1.5
SELECT q.s FROM (SELECT s FROM db.a UNION SELECT n FROM db.c) q WHERE q.s LIKE 't%' OR q.s = 'a'
SELECT q.x, q.y FROM (SELECT k AS x, id AS y FROM db.a UNION ALL SELECT id, k FROM db.b) q WHERE q.x = 4 AND q.y > 1
WITH a AS (SELECT * FROM db.c WHERE k > 1) SELECT * FROM a
WITH c AS (SELECT * FROM db.c WHERE k > 1) SELECT c.n, x.n FROM c, db.c x WHERE c.k = x.k
WITH q AS (SELECT * FROM db.a) SELECT x.id FROM q x JOIN q y ON x.id = y.id WHERE x.k = 1 AND y.s = 'ab'
WITH q AS (SELECT * FROM db.a) SELECT id FROM q WHERE k = 1 UNION ALL SELECT id FROM q WHERE k = 3
WITH q AS (SELECT * FROM db.a), r AS (SELECT * FROM q WHERE k = 1) SELECT (SELECT count(*) FROM q), count(*) FROM r
WITH q AS (SELECT k, count(*) AS n FROM db.a GROUP BY k) SELECT q.k, q.n FROM q JOIN db.c ON q.k = c.k WHERE c.n = 'two'
WITH q (x, y) AS (SELECT k, id FROM db.a) SELECT x FROM q WHERE y = 5
WITH q AS (WITH q AS (SELECT k FROM db.c WHERE k > 1) SELECT k + 1 AS k FROM q) SELECT k FROM q WHERE k > 2
WITH q AS (SELECT 1 AS k) SELECT id FROM db.a WHERE k = (SELECT k FROM q)
WITH q AS (SELECT k FROM db.c WHERE n = 'two') SELECT id FROM db.a WHERE k IN (SELECT k FROM q) OR id IN (SELECT k FROM q)
SELECT k, count(*) FROM db.a GROUP BY k HAVING k > 2
SELECT k, count(*) FROM db.a GROUP BY k HAVING k > 2 OR count(*) > 3
SELECT k, count(*) FROM db.a GROUP BY k HAVING k IS NULL
SELECT count(*) FROM db.a HAVING count(*) > 100
SELECT count(*) FROM db.a WHERE id > 1000 HAVING count(*) = 0
SELECT 1 FROM db.a HAVING count(*) > 3
SELECT sum(k) FROM db.a HAVING sum(k) > 1
SELECT count(*), sum(id), max(s), count(DISTINCT k) FROM db.e
SELECT k, count(*) FROM db.e GROUP BY k
SELECT a.id FROM db.a LEFT JOIN db.e ON a.id = e.id WHERE e.id IS NULL AND a.k = 1
SELECT a.id FROM db.a JOIN db.e ON a.id = e.id
SELECT a.id FROM db.a WHERE a.id = (SELECT e.id FROM db.e)
SELECT a.id FROM db.a WHERE a.id > (SELECT max(e.id) FROM db.e) OR a.id = 3
SELECT q.c FROM (SELECT count(*) AS c FROM db.a WHERE k = 1) q WHERE q.c > 1
SELECT q.c FROM (SELECT count(*) AS c FROM db.a WHERE k = 99) q WHERE q.c = 0
SELECT q.k, q.c FROM (SELECT k, count(*) AS c FROM db.a GROUP BY k) q WHERE q.k = 1
SELECT q.k, q.c FROM (SELECT k, count(*) AS c FROM db.a GROUP BY k) q WHERE q.c = 4 AND q.k > 2
SELECT q.m FROM (SELECT max(k) AS m FROM db.a) q WHERE q.m = 5
SELECT q.m FROM (SELECT max(k) AS m FROM db.a) q WHERE q.m = 1
SELECT q.m FROM (SELECT DISTINCT k AS m FROM db.a) q WHERE q.m = 1
SELECT q.id FROM (SELECT id, k FROM db.a ORDER BY id LIMIT 5) q WHERE q.k = 1
SELECT q.id FROM (SELECT id, k FROM db.a ORDER BY id OFFSET 5) q WHERE q.k = 1
SELECT q.id, q.r FROM (SELECT id, k, row_number() OVER (ORDER BY id) AS r FROM db.a) q WHERE q.k = 3
SELECT q.id, q.r FROM (SELECT id, k, row_number() OVER (PARTITION BY k ORDER BY id) AS r FROM db.a) q WHERE q.k = 3
SELECT q.id, q.r FROM (SELECT id, k, row_number() OVER (PARTITION BY k ORDER BY id) AS r FROM db.a) q WHERE q.id = 13
SELECT q.id, q.r, q.n FROM (SELECT id, k, s, row_number() OVER (PARTITION BY k ORDER BY id) AS r, count(*) OVER (PARTITION BY s) AS n FROM db.a) q WHERE q.k = 3
SELECT q.k, q.r FROM (SELECT k, rank() OVER (ORDER BY count(*), k) AS r FROM db.a GROUP BY k) q WHERE q.k = 3
SELECT q.k, q.r FROM (SELECT k, sum(count(*)) OVER (PARTITION BY k) AS r FROM db.a GROUP BY k) q WHERE q.k = 3
SELECT id, sum(k) OVER (ORDER BY id) AS r FROM db.a WHERE k = 3
SELECT id, max(k) OVER (PARTITION BY s) AS r FROM db.a WHERE k < 3
SELECT id FROM db.a WHERE v = 0
SELECT id FROM db.a WHERE v = -0.0E0
SELECT id FROM db.a WHERE v < 0.1E0
SELECT id FROM db.a WHERE f = 0.1
SELECT id FROM db.a WHERE v IN (0E0, 1.5E0)
SELECT id FROM db.a WHERE v IS DISTINCT FROM 1.5E0 AND k = 2
SELECT id FROM db.a WHERE p = 2.5
SELECT id FROM db.a WHERE p = 2.500
SELECT id FROM db.a WHERE p = 2.501
SELECT id FROM db.a WHERE p < 2.501 AND p > 2.499
SELECT id FROM db.a WHERE p >= 2.505
SELECT id FROM db.a WHERE p IN (2.5, 3.75, 0.001)
SELECT id FROM db.a WHERE p = 2.5E0
SELECT a.id, b.id FROM db.a JOIN db.b ON a.p = b.p
SELECT a.id FROM db.a WHERE a.p IN (SELECT b.p FROM db.b)
SELECT id FROM db.a WHERE k = 2.0
SELECT id FROM db.a WHERE k < 2.5
SELECT id FROM db.a WHERE k = 3000000000
SELECT id FROM db.a WHERE k < 3000000000
SELECT id FROM db.a WHERE id > -9223372036854775808
SELECT id FROM db.a WHERE k + 1 = 3
SELECT id FROM db.a WHERE 5 - k > 3
SELECT id FROM db.a WHERE k * 2 >= 7
SELECT id FROM db.a WHERE k * -2 <= -7
SELECT id FROM db.a WHERE k * 0 = 0
SELECT id FROM db.a WHERE -k < -3
SELECT id FROM db.a WHERE p + 1.25 = 3.75
SELECT id FROM db.a WHERE 1.25 - p <= -2.5
SELECT id FROM db.a WHERE s = 'a'
SELECT id FROM db.a WHERE s = 'a '
SELECT id FROM db.a WHERE s = ''
SELECT id FROM db.a WHERE s <> ''
SELECT id FROM db.a WHERE s > 'a' AND s < 'b'
SELECT id FROM db.a WHERE s LIKE 'a%'
SELECT id FROM db.a WHERE s LIKE 'b!%c' ESCAPE '!'
SELECT id FROM db.a WHERE s NOT LIKE '%'
SELECT id FROM db.a WHERE s LIKE ''
SELECT id FROM db.a WHERE s NOT LIKE 'a%'
SELECT id FROM db.a WHERE s LIKE '_'
SELECT id FROM db.a WHERE lower(s) = 'b'
SELECT id FROM db.a WHERE upper(s) = 'AB'
SELECT id FROM db.a WHERE lower(s) LIKE 'stra%'
SELECT a.id FROM db.a JOIN db.c ON a.k = c.k WHERE lower(c.n) LIKE '%o%'
SELECT a.id FROM db.a JOIN db.c ON a.k = c.k WHERE c.n LIKE '%o%' OR c.s LIKE '%ß%'
SELECT a.id FROM db.a JOIN db.c ON a.k = c.k WHERE upper(c.s) LIKE 'STRA%'
SELECT id FROM db.a WHERE substr(s, 1, 1) = 'a'
SELECT id FROM db.a WHERE substr(s, 1, 2) = 'a'
SELECT id FROM db.a WHERE substr(s, 1, 1) <> 'a'
SELECT id FROM db.a WHERE substr(s, 1, 1) >= 'b'
SELECT id FROM db.a WHERE substr(s, 1, 1) <= 'a'
SELECT id FROM db.a WHERE coalesce(s, '') = ''
SELECT id FROM db.a WHERE coalesce(k, 99) > 4
SELECT id FROM db.a WHERE coalesce(k, id) = 3
SELECT id FROM db.a WHERE coalesce(k, id, -1) = -1
SELECT id FROM db.a WHERE NOT (coalesce(k, 0) = 0)
SELECT id FROM db.a WHERE nullif(k, 2) = 2 OR nullif(k, 2) = 3
SELECT id FROM db.a WHERE nullif(k, 2) IS NULL
SELECT id FROM db.a WHERE CASE WHEN k = 1 THEN 'x' WHEN k > 3 THEN 'y' ELSE 'z' END = 'y'
SELECT id FROM db.a WHERE CASE WHEN k = 1 THEN 'x' WHEN k > 3 THEN 'y' END <> 'y'
SELECT id FROM db.a WHERE CASE WHEN k = 1 THEN id > 5 ELSE id < 3 END
SELECT id FROM db.a WHERE NOT CASE WHEN k = 1 THEN id > 5 ELSE id < 3 END
SELECT id FROM db.a WHERE CASE k WHEN 1 THEN 10 WHEN NULL THEN 20 ELSE 30 END = 30
SELECT id FROM db.a WHERE ok
SELECT id FROM db.a WHERE NOT ok
SELECT id FROM db.a WHERE ok = FALSE
SELECT id FROM db.a WHERE ok IS NULL
SELECT id FROM db.a WHERE ok IS DISTINCT FROM TRUE
SELECT id FROM db.a WHERE (k = 1) = TRUE
SELECT id FROM db.a WHERE (k = 1) IS NULL
SELECT id FROM db.a WHERE k = NULL OR k <> NULL OR id = 2
SELECT id FROM db.a WHERE k IN (NULL, 1)
SELECT id FROM db.a WHERE k NOT IN (1, NULL)
SELECT id FROM db.a WHERE NOT (k NOT IN (1, NULL))
SELECT id FROM db.a WHERE k BETWEEN 4 AND 2
SELECT id FROM db.a WHERE k NOT BETWEEN 1 AND 3
SELECT id FROM db.a WHERE k NOT BETWEEN 4 AND 2
SELECT id FROM db.a WHERE k NOT BETWEEN NULL AND 2
SELECT id FROM db.a WHERE k BETWEEN NULL AND 2
SELECT id FROM db.a WHERE k IS NOT DISTINCT FROM NULL
SELECT id FROM db.a WHERE d = DATE '2020-02-01'
SELECT id FROM db.a WHERE d < TIMESTAMP '2020-02-01 12:00:00'
SELECT id FROM db.a WHERE d = TIMESTAMP '2020-02-01 12:00:00'
SELECT id FROM db.a WHERE ts >= DATE '2020-03-01' AND ts < DATE '2020-03-02'
SELECT id FROM db.a WHERE CAST(ts AS date) = DATE '2020-02-29'
SELECT id FROM db.a WHERE CAST(ts AS date) <= DATE '2020-02-29'
SELECT id FROM db.a WHERE date_trunc('month', ts) = DATE '2020-02-01'
SELECT id FROM db.a WHERE date_trunc('month', d) > DATE '2020-01-31'
SELECT id FROM db.a WHERE date_trunc('week', ts) < TIMESTAMP '2020-03-02 00:00:00'
SELECT id FROM db.a WHERE date_trunc('day', ts) <> TIMESTAMP '2020-02-29 00:00:00'
SELECT id FROM db.a WHERE year(d) = 2020 AND month(d) = 2
SELECT id FROM db.a WHERE year(d) = 2020 AND month(d) = 13
SELECT id FROM db.a WHERE extract(year FROM ts) = 2020 AND extract(month FROM ts) = 2
SELECT id FROM db.a WHERE d + INTERVAL '1' DAY = DATE '2020-02-01'
SELECT id FROM db.a WHERE d - INTERVAL '1' MONTH = DATE '2020-01-01'
SELECT id FROM db.a WHERE ts + INTERVAL '12' HOUR > TIMESTAMP '2020-03-04 00:00:00'
SELECT id FROM db.a WHERE date_diff('day', d, DATE '2020-02-05') = 2
SELECT id FROM db.a WHERE date_diff('day', DATE '2020-02-05', d) > 2
SELECT id FROM db.a WHERE date_diff('day', d, DATE '2020-02-05') <= -2
SELECT id FROM db.a WHERE d < current_date - INTERVAL '7' DAY AND k = 1
SELECT id FROM db.a WHERE d > current_date
SELECT a.id, b.id FROM db.a JOIN db.b ON CAST(a.ts AS date) = b.d
SELECT a.id, b.id FROM db.a JOIN db.b ON date_trunc('day', a.d) = b.d WHERE b.w = 1
SELECT a.id FROM db.a JOIN db.b ON a.k = b.k JOIN db.c ON b.s = c.s WHERE c.n = 'one' OR b.w = 3
SELECT a.id FROM db.a JOIN db.b ON a.k = b.k JOIN db.c ON a.k = c.k WHERE (b.w = 1 AND c.n = 'one') OR (b.w = 2 AND c.n = 'two')
SELECT a.id FROM db.a, db.b, db.c WHERE a.k = b.k AND b.k = c.k AND (c.n = 'one' OR a.id = 13)
SELECT a.id FROM db.a, db.b WHERE a.k = b.k AND (b.s IS NULL OR a.s = 'ab')
SELECT a.id FROM db.a JOIN db.b ON a.k = b.k OR a.id = b.id WHERE b.w = 3
SELECT a.id FROM db.a JOIN db.b ON a.k = b.k AND a.k = 1 OR a.id = b.id AND b.w = 3
SELECT a.k FROM db.a WHERE a.k IN (SELECT b.k FROM db.b WHERE b.id IN (SELECT c.k FROM db.c WHERE c.n = 'two'))
SELECT a.k FROM db.a WHERE a.k IN (SELECT k FROM db.b WHERE id = a.id)
SELECT a.id FROM db.a WHERE a.k IN (SELECT b.k FROM db.b GROUP BY b.k HAVING count(*) > 2)
SELECT a.id FROM db.a WHERE a.k IN (SELECT max(b.k) FROM db.b GROUP BY b.w)
SELECT a.id FROM db.a WHERE a.k IN (SELECT b.k FROM db.b ORDER BY b.id LIMIT 2)
SELECT a.id FROM db.a WHERE a.k IN (SELECT b.k FROM db.b UNION SELECT c.k FROM db.c WHERE c.n = 'four')
SELECT a.id FROM db.a WHERE a.k IN (SELECT b.k FROM db.b EXCEPT SELECT c.k FROM db.c WHERE c.n = 'two')
SELECT a.id FROM db.a WHERE a.k IN (SELECT b.k FROM db.b LEFT JOIN db.c ON b.k = c.k WHERE c.n = 'two')
SELECT a.id FROM db.a WHERE a.k IN (SELECT c.k FROM db.b LEFT JOIN db.c ON b.k = c.k)
SELECT a.id FROM db.a JOIN (VALUES (1, 'x'), (2, 'y')) AS t (k, l) ON a.k = t.k WHERE t.l = 'y'
SELECT a.id, t.l FROM db.a LEFT JOIN (VALUES (1, 'x'), (2, 'y')) AS t (k, l) ON a.k = t.k
SELECT q."X y" FROM (SELECT k AS "X y", id FROM db.a) q WHERE q."x Y" = 2
SELECT "a"."ID" FROM "db"."a" WHERE "A"."K" = 2
SELECT q.x FROM (SELECT k AS x, id AS y, k AS z FROM db.a) q WHERE q.z = 2
SELECT count(*) FROM (SELECT k, k FROM db.a WHERE k = 1) q
SELECT k AS id, id AS k FROM db.a WHERE k = 3
SELECT q.id FROM (SELECT k AS id, id AS k FROM db.a) q WHERE q.k = 3
SELECT sum(k) FILTER (WHERE id > 10), count(*) FILTER (WHERE s = 'ab') FROM db.a
SELECT sum(CASE WHEN id > 10 THEN k END), max(CASE WHEN s = 'ab' THEN id END) FROM db.a
SELECT sum(CASE WHEN id > 10 THEN k ELSE 0 END) FROM db.a
SELECT sum(CASE WHEN id > 10 THEN k END), count(*) FROM db.a
SELECT k, sum(CASE WHEN id > 10 THEN 1 END) FROM db.a GROUP BY k
SELECT count_if(k = 1), count(CASE WHEN k = 2 THEN 1 END) FROM db.a
SELECT sum(k) FILTER (WHERE id > 10) + count(*) FILTER (WHERE k = 99) FROM db.a
SELECT count(DISTINCT k) FILTER (WHERE id > 10) FROM db.a
SELECT id, k FROM db.a ORDER BY k DESC, id LIMIT 3
SELECT id, k FROM db.a WHERE k > 1 ORDER BY k, id DESC LIMIT 3
SELECT id, k FROM db.a ORDER BY k DESC NULLS FIRST, id NULLS FIRST OFFSET 2 LIMIT 3
SELECT id, -k AS k FROM db.a WHERE id IS NOT NULL ORDER BY k NULLS LAST, id LIMIT 4
SELECT DISTINCT k FROM db.a ORDER BY k DESC LIMIT 2
SELECT k, count(*) AS n FROM db.a GROUP BY 1 ORDER BY n DESC, k LIMIT 3
SELECT k + 1, count(*) FROM db.a GROUP BY k + 1
SELECT a.k, count(*) FROM db.a JOIN db.b ON a.k = b.k GROUP BY a.k ORDER BY count(*) DESC, a.k LIMIT 2
SELECT a.id FROM db.a WHERE a.id = 5 OR FALSE
SELECT a.id FROM db.a WHERE a.id = 5 AND NULL
SELECT a.id FROM db.a WHERE a.id = 5 OR NULL
SELECT a.id FROM db.a WHERE NOT (a.id <> 5 OR NULL)
SELECT a.id FROM db.a WHERE NOT (NOT (NOT (a.k > 2)))
SELECT a.id FROM db.a WHERE a.id = a.k
SELECT a.id FROM db.a WHERE a.id IS NULL AND a.k = 1
SELECT x.id FROM db.a x WHERE EXISTS (SELECT 1 FROM db.a y WHERE y.k = x.k AND y.id > x.id AND y.s = 'ab')
SELECT x.id FROM db.a x WHERE x.id = (SELECT max(y.id) FROM db.a y WHERE y.k = x.k)
SELECT x.id FROM db.a x WHERE x.id < (SELECT avg(y.id) FROM db.a y WHERE y.k = x.k) AND x.s = 'a'
SELECT x.id, (SELECT max(y.n) FROM db.c y WHERE y.k = x.k) FROM db.a x WHERE x.id IN (5, 13)
SELECT x.id FROM db.a x LEFT JOIN db.c y ON x.k = y.k AND x.id > 10 WHERE y.n = 'three' OR x.id = 2
SELECT s, count(*) FROM (SELECT s FROM db.a WHERE k = 1 UNION ALL SELECT s FROM db.b WHERE k = 1) q GROUP BY s HAVING s = 'ab'
SELECT (SELECT n FROM db.c WHERE k = 1), (SELECT n FROM db.c WHERE k = 99)
SELECT 1 WHERE EXISTS (SELECT 1 FROM db.a WHERE k = 1)
SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM db.a WHERE k = 99)
SELECT a.id FROM db.a CROSS JOIN (SELECT max(k) AS m FROM db.c) q WHERE a.k = q.m
SELECT a.id FROM db.a JOIN (SELECT k, max(n) AS n FROM db.c GROUP BY k) q ON a.k = q.k WHERE q.n = 'two'
SELECT a.id FROM db.a JOIN (SELECT DISTINCT k FROM db.b WHERE w = 3) q ON a.k = q.k
SELECT a.id FROM db.a JOIN (SELECT k FROM db.b WHERE w = 3 LIMIT 100) q ON a.k = q.k
SELECT a.id FROM db.a LEFT JOIN (SELECT k, 1 AS x FROM db.c WHERE n = 'two') q ON a.k = q.k WHERE q.x IS NULL
SELECT a.id FROM db.a LEFT JOIN (SELECT k, 1 AS x FROM db.c WHERE n = 'two') q ON a.k = q.k WHERE q.x = 1
SELECT ALL k FROM db.a WHERE k = 1
SELECT id FROM db.a WHERE k > 2 AND k > 3 AND k >= 3
SELECT id FROM db.a WHERE (k, id) IN ((1, 5), (2, 9))
SELECT id FROM db.a WHERE k = 1 AND id IN (SELECT id FROM db.b WHERE k = 1)
SELECT k FROM db.b WHERE k IN (SELECT k FROM db.c WHERE c.k = b.k AND n = 'two')
SELECT k, count(*) AS n, sum(id) AS total FROM db.a GROUP BY k ORDER BY total / n DESC, k LIMIT 3
SELECT k AS x, count(*) FROM db.a GROUP BY k ORDER BY x + 1 DESC LIMIT 3
SELECT id, sum(k) AS t FROM db.a WHERE id < 9 GROUP BY id ORDER BY -t, id LIMIT 3
SELECT a.id FROM db.a WHERE year(d) = 2020 AND d >= DATE '2020-02-01'
SELECT a.id FROM db.a WHERE year(d) = 2020 AND (d < DATE '2020-02-01' OR year(d) = 2021)
SELECT a.id FROM db.a WHERE CAST(ts AS date) = DATE '2020-02-29' AND ts > TIMESTAMP '2020-02-29 06:00:00'
SELECT a.id FROM db.a WHERE year(ts) = 2020 AND ts < TIMESTAMP '2020-03-01 00:00:00'
SELECT a.id FROM db.a WHERE CAST(ts AS date) > DATE '2020-03-01' AND date_trunc('hour', ts) < TIMESTAMP '2020-03-02 12:00:00'
SELECT a.id FROM db.a WHERE ts IN (TIMESTAMP '2020-02-28 12:00:00', TIMESTAMP '2020-02-28 18:00:00.000001')
SELECT a.id FROM db.a WHERE ts = DATE '2020-02-29'
SELECT a.id, b.w, c.n FROM db.c, db.a FULL JOIN db.b ON a.id = b.id AND b.w = 2 WHERE c.k = 1
SELECT a.id, x.k, y.k FROM db.c x, db.e RIGHT JOIN db.a ON e.id = a.id, db.c y WHERE x.k = 1 AND y.k = x.k + a.k
SELECT a.k, a.s, count(*) FROM db.a GROUP BY GROUPING SETS ((a.k), (a.s), ())
SELECT q.k, q.n FROM (SELECT k, s, count(*) AS n FROM db.a GROUP BY GROUPING SETS ((k), (s), ())) q WHERE q.k = 1
SELECT q.k, q.n FROM (SELECT k, s, count(*) AS n FROM db.a GROUP BY GROUPING SETS ((k), (k, s))) q WHERE q.k = 1
SELECT q.k, q.s, q.n FROM (SELECT k, s, count(*) AS n FROM db.a GROUP BY ROLLUP (k, s)) q WHERE q.k = 1 OR q.k IS NULL
SELECT q.k, q.s, q.n FROM (SELECT k, s, count(*) AS n FROM db.a GROUP BY CUBE (k, s)) q WHERE q.k IS NULL AND q.s = 'a'
SELECT k, count(*) FROM db.a GROUP BY GROUPING SETS ((k), ()) HAVING k = 1
SELECT k, count(*) FROM db.a GROUP BY ROLLUP (k) HAVING k = 1 OR count(*) > 20
SELECT a.id, q.n FROM db.a CROSS JOIN LATERAL (SELECT n FROM db.c WHERE c.k = a.k) q WHERE a.id > 5
SELECT a.id, q.n FROM db.a LEFT JOIN LATERAL (SELECT max(n) AS n FROM db.c WHERE c.k = a.k) q ON TRUE WHERE a.k = 1
SELECT a.id, q.n FROM db.a CROSS JOIN LATERAL (SELECT count(*) AS n FROM db.c WHERE c.k = a.k AND c.n = 'one') q WHERE q.n = 0
SELECT a.id, q.x FROM db.a CROSS JOIN LATERAL (SELECT a.k + 1 AS x) q WHERE q.x = 2
SELECT a.id FROM db.a JOIN db.b b ON a.id = b.id CROSS JOIN LATERAL (SELECT k FROM db.c WHERE c.k = b.k) q WHERE q.k = 2
SELECT q.id, q.p FROM (SELECT id, k, lag(id) OVER (PARTITION BY k ORDER BY id) AS p FROM db.a) q WHERE q.k = 2 AND q.id > 8
SELECT q.id, q.p FROM (SELECT id, k, lag(id) OVER (ORDER BY id) AS p FROM db.a) q WHERE q.k = 2
SELECT q.id, q.p FROM (SELECT id, k, s, first_value(id) OVER (PARTITION BY k, s ORDER BY id) AS p FROM db.a) q WHERE q.k = 2 AND q.s = 'a'
SELECT q.k, q.r FROM (SELECT k, count(*) AS n, rank() OVER (PARTITION BY k ORDER BY count(*)) AS r FROM db.a GROUP BY k) q WHERE q.k = 2
SELECT q.k, q.r FROM (SELECT DISTINCT k, max(id) OVER (PARTITION BY k) AS r FROM db.a) q WHERE q.k = 2
SELECT DISTINCT a.k, count(*) OVER () FROM db.a WHERE a.k > 2
SELECT max(q.r) FROM (SELECT k, row_number() OVER (ORDER BY id) AS r FROM db.a) q WHERE q.k = 4
SELECT a.id FROM db.a WHERE a.k = ANY (SELECT b.k FROM db.b WHERE b.w = 1)
SELECT a.id FROM db.a WHERE a.k = ALL (SELECT b.k FROM db.b WHERE b.w = 9)
SELECT a.id FROM db.a WHERE a.k > ALL (SELECT b.k FROM db.b WHERE b.k < 3)
SELECT a.id FROM db.a WHERE a.k <> ALL (SELECT c.k FROM db.c WHERE c.k > 1)
SELECT a.id FROM db.a WHERE (a.k, a.id) IN (SELECT b.k, b.id FROM db.b)
SELECT a.id FROM db.a WHERE (a.k = 1) = (a.id = 5)
SELECT a.id FROM db.a WHERE (a.k = 1) <> (a.id = 5)
SELECT a.id FROM db.a WHERE (a.k = 1 AND NOT (a.s = 'a')) IS NOT TRUE
SELECT a.id FROM db.a WHERE NOT (a.k = 1 AND EXISTS (SELECT 1 FROM db.b WHERE b.id = a.id))
SELECT a.id FROM db.a WHERE a.k IN (1, 2) AND a.k NOT IN (2, 3)
SELECT a.id FROM db.a WHERE a.k IN (SELECT b.k FROM db.b WHERE b.k IN (SELECT a.k FROM db.c WHERE c.n = 'one'))
SELECT x.id FROM db.a x JOIN db.a y ON x.k = y.id AND y.s = 'a' JOIN db.a z ON y.k = z.id WHERE z.id = 0 OR z.id IS NULL
SELECT x.k FROM (SELECT k FROM db.a WHERE s = 'a') x FULL JOIN (SELECT k FROM db.c WHERE n <> 'one') y ON x.k = y.k WHERE x.k = 2
SELECT x.k, y.k FROM (SELECT k FROM db.a WHERE s = 'a') x FULL JOIN (SELECT k FROM db.c WHERE n <> 'one') y ON x.k = y.k WHERE coalesce(x.k, y.k) = 2
SELECT k FROM (SELECT k FROM db.a WHERE s = 'a') x FULL JOIN (SELECT k FROM db.c WHERE n <> 'one') y USING (k) WHERE k > 2
SELECT q.k, q.t FROM (SELECT k, 'a' AS t FROM db.a UNION ALL SELECT k, 'c' FROM db.c) q WHERE q.t = 'c' AND q.k = 2
SELECT q.k FROM (SELECT k FROM db.a UNION ALL SELECT NULL) q WHERE q.k IS NULL OR q.k = 2
SELECT q.k FROM (SELECT k FROM db.a WHERE k > 2 EXCEPT (SELECT k FROM db.c ORDER BY k DESC NULLS LAST LIMIT 1)) q WHERE q.k > 3
SELECT q.d FROM (SELECT d FROM db.a UNION SELECT CAST(ts AS date) FROM db.a) q WHERE q.d < DATE '2020-02-01'
SELECT q.x FROM (SELECT d AS x FROM db.a UNION ALL SELECT ts FROM db.a) q WHERE q.x = TIMESTAMP '2020-02-02 00:00:00'
SELECT q.k, q.c FROM (SELECT k, k AS c, sum(id) AS t FROM db.a GROUP BY k, 2) q WHERE q.c = 3
SELECT q.k FROM (SELECT k, count(*) AS id FROM db.a GROUP BY k) q WHERE q.id = 4
SELECT c.n FROM db.c WHERE c.k = (SELECT count(*) FROM db.a WHERE a.k = 1) - 2
SELECT c.n, (SELECT count(*) FROM db.a WHERE a.k = c.k AND a.id > (SELECT min(b.id) FROM db.b WHERE b.k = c.k)) FROM db.c
SELECT a.id FROM db.a WHERE a.d = (SELECT max(b.d) FROM db.b WHERE b.d < DATE '2020-02-05')
SELECT a.id FROM db.a WHERE a.d >= (SELECT min(b.d) FROM db.b) AND a.d <= (SELECT max(c.d) FROM db.c)
SELECT sum(a.k) FILTER (WHERE a.id IN (SELECT b.id FROM db.b)) FROM db.a
SELECT max(CASE WHEN a.k = 1 THEN a.id END), min(CASE a.k WHEN 2 THEN a.id END) FROM db.a JOIN db.c ON a.k = c.k
SELECT count(*) FILTER (WHERE c.n = 'one'), count(c.k) FILTER (WHERE a.k = 2) FROM db.a LEFT JOIN db.c ON a.k = c.k
