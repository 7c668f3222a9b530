SELECT hour(tz), day(tz), year(tz), CAST(tz AS date), CAST(tz AS timestamp) FROM {t}
SELECT date_format(ts, '%Y-%m-%d %H:%i:%s'), date_format(d, '%d/%m/%Y'), date_format(ts, '%Y') FROM {t}
SELECT date_add('day', -3, d), date_add('month', 1, d), date_add('quarter', 2, d), date_add('year', -60, ts), date_add('week', 1, ts) FROM {t}
SELECT date_add('hour', 5, ts), date_add('minute', 61, ts), date_add('second', -1, ts), date_add('millisecond', 1500, ts), date_add('day', 1, tz) FROM {t}
SELECT last_day_of_month(d), last_day_of_month(ts), year_of_week(d), yow(ts), extract(dow FROM ts), extract(doy FROM d), extract(year_of_week FROM d), date(ts), date(d) FROM {t}
SELECT id, from_iso8601_date('2024-02-29'), date_parse('2024-02-29 10:11:12', '%Y-%m-%d %H:%i:%s'), from_unixtime(86400) FROM {t} WHERE id < 5
SELECT is_nan(x), is_finite(x), is_infinite(x), is_nan(r), is_finite(r), nan(), infinity(), -infinity(), is_nan(k) FROM {t}
SELECT floor(amt), ceiling(amt), ceil(-amt), floor(amt * 0.001), floor(CAST(amt AS decimal(38,10))) FROM {t}
SELECT split_part(name, '_', 1), split_part(name, 'b', 2), split_part(name, 'b', 3), concat_ws('-', name, 'q', name), concat_ws(name, 'a', 'b') FROM {t}
SELECT trim(name), ltrim(name), rtrim(name), length(trim(name)) FROM {t}
SELECT CAST(b AS varchar), CAST(b AS integer), CAST(b AS bigint), b IS TRUE, b IS NOT FALSE, b IS UNKNOWN, (k > 1) IS NOT TRUE FROM {t}
SELECT s.a, s.c, p.s.a + 1, upper(p.s.c) FROM {t} p
SELECT t.s.a, t.s FROM {t} t WHERE t.s.c IN ('q', 'r') ORDER BY t.s.a, t.id, t.k LIMIT 20
SELECT s.a, count(*), max(s.c) FROM {t} GROUP BY s.a HAVING max(s.c) IS NOT NULL
SELECT S.A FROM {t} WHERE s.a > 1
SELECT q.s.a FROM (SELECT s FROM {t} WHERE k = 1) q
SELECT max(s.a), min(s.c), sum(s.a) FILTER (WHERE s.c = 'q') FROM {t}
SELECT cardinality(tags), cardinality(m), contains(tags, 'a'), contains(tags, 'zz'), contains(tags, NULL), element_at(tags, 1), element_at(tags, -1), element_at(tags, 9), element_at(m, 'a'), element_at(m, 'b'), element_at(m, 'zz') FROM {t}
SELECT tags[1] FROM {t} WHERE cardinality(tags) > 0
SELECT m['a'] FROM {t} WHERE contains(tags, 'a') AND element_at(m, 'a') IS NOT NULL
SELECT tags, m, s FROM {t} WHERE id BETWEEN 1 AND 40
SELECT t.id, u.tag FROM {t} t CROSS JOIN UNNEST(t.tags) AS u(tag)
SELECT t.id, u.tag, u.n FROM {t} t CROSS JOIN UNNEST(tags) WITH ORDINALITY AS u(tag, n) WHERE u.tag IS NULL OR u.n = 1
SELECT u.tag, count(*) FROM {t}, UNNEST(tags) AS u(tag) WHERE k = 1 GROUP BY u.tag
SELECT a.id, u.tag, b.k FROM {t} a CROSS JOIN UNNEST(a.tags) AS u(tag) JOIN {o} b ON b.id = a.id WHERE u.tag = 'a'
SELECT id, k, lag(k) OVER (ORDER BY id, k, name, ts, amt), lead(k, 2) OVER (ORDER BY id, k, name, ts, amt), lag(k, 1, 0) OVER (ORDER BY id, k, name, ts, amt) FROM {t} WHERE id BETWEEN 1 AND 30
SELECT id, lag(amt, 1, 0) OVER (PARTITION BY k ORDER BY id, name, ts, amt) FROM {t} WHERE id BETWEEN 1 AND 30
SELECT first_value(id) OVER (PARTITION BY k ORDER BY id, name, ts, amt), last_value(id) OVER (PARTITION BY k ORDER BY id, name, ts, amt ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING), ntile(3) OVER (ORDER BY id, k, name, ts, amt) FROM {t}
SELECT sum(k) OVER (ORDER BY id, name, ts, amt ROWS BETWEEN 2 PRECEDING AND 1 FOLLOWING), count(*) OVER (ORDER BY id, name, ts, amt ROWS 1 PRECEDING), max(amt) OVER (ORDER BY id, name, ts, amt ROWS BETWEEN 1 FOLLOWING AND 2 FOLLOWING), min(d) OVER (ORDER BY id, name, ts, amt ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) FROM {t} WHERE id BETWEEN 1 AND 30 AND k < 10
SELECT sum(amt) OVER (PARTITION BY b ORDER BY id, name, ts ROWS BETWEEN 1 PRECEDING AND 1 PRECEDING) FROM {t} WHERE id BETWEEN 1 AND 30
SELECT k, max_by(id, d) IS NULL, min_by(k, id), max_by(k, name) FROM {t} WHERE id BETWEEN 1 AND 100 GROUP BY k
SELECT max_by(name, id), min_by(amt, id), max_by(s.a, id) FROM {t} WHERE id BETWEEN 0 AND 100
SELECT id FROM {t} WHERE (id, k) = (5, 1) OR (id, k) <> (6, 2) AND id < 9
SELECT id, k FROM {t} WHERE (id, name) NOT IN ((1, 'a'), (2, NULL), (3, 'abc')) AND id < 20
SELECT id, (k, b) = (1, NULL), (k, b) <> (2, true), (k, x) = (1, nan()), (k, x) <> (0, 0.1), (k, amt) = (1, 100), (id, k) = (CAST(NULL AS bigint), 1) FROM {t}
SELECT CAST(ts AS timestamp), CAST(ts AS timestamp(6)), CAST(tz AS timestamp), CAST(tz AS timestamp(6)) FROM {t}
SELECT date_format(CAST(ts AS timestamp), '%H:%i:%s') FROM {t} WHERE ts < TIMESTAMP '1970-01-01 00:00:00'
SELECT id FROM {t} WHERE id IN (VALUES 1, 2, 3) OR k NOT IN (VALUES 1, 2)
SELECT id, k = ANY (SELECT k FROM {o} WHERE k < 3), k <> ALL (SELECT k FROM {o} WHERE k < 3) FROM {t}
SELECT bin = X'6162', bin < X'ff', length(bin), X'00ff' FROM {t}
SELECT count(*) FROM {t} WHERE bin >= X'61' AND bin <> X''
SELECT coalesce(tags, tags), CASE WHEN k = 1 THEN s END FROM {t} WHERE id BETWEEN 1 AND 20
SELECT element_at(CASE WHEN k = 1 THEN tags END, 1), cardinality(coalesce(tags, tags)) FROM {t}
