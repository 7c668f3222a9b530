id = 5
id <> 5
id NOT IN (1, 2)
id NOT IN (1, NULL)
id = 9007199254740992e0
id = 9007199254740993
id + 1 = 10
-id > 5
id % 7 = 3
abs(id) < 4
id / 2 = 3
id * 2 IN (4, 6, 8)
mod(id, 5) = -1
id BETWEEN 3 AND k
id BETWEEN SYMMETRIC 9 AND 3
id IS DISTINCT FROM 5
id IS NOT DISTINCT FROM NULL
(id = 3) IS NULL
NOT (id = 3 OR k = 1)
(id > 3) = (k > 1)
(id, k) = (3, 1)
(id, k) IN ((3, 1), (4, NULL))
(id, k) NOT IN ((3, 1), (4, 2))
(k, name) > (1, 'ab')
coalesce(k, id) = 3
nullif(k, 1) IS NULL
if(k = 1, id, 0) > 4
CASE k WHEN 1 THEN 'a' WHEN 2 THEN name ELSE 'z' END = 'a'
CASE WHEN id > 4 THEN true WHEN k = 1 THEN NULL ELSE false END
try_cast(name AS integer) = 10
try(CAST(name AS integer)) > 8
CAST(id AS varchar) = '7'
CAST(id AS varchar) LIKE '1%'
CAST(k AS double) = 1e0
CAST(id AS decimal(20,1)) = 5.0
CAST(x AS real) = REAL '0.1'
CAST(amt AS integer) = 100
CAST(amt AS bigint) BETWEEN -1 AND 1
CAST(ts AS date) = DATE '2024-02-29'
CAST(ts AS date) IN (DATE '1969-12-31', DATE '1970-01-01')
CAST(d AS timestamp) > TIMESTAMP '2024-02-28 23:59:59'
CAST(d AS varchar) LIKE '2024-%'
CAST(d AS varchar) = '1970-01-01'
CAST(b AS varchar) = 'true'
CAST(b AS integer) = 1
CAST('2024-02-29' AS date) = d
d = DATE '2024-02-29'
d > DATE '2023-12-31' - INTERVAL '1' MONTH
d + INTERVAL '1' DAY = DATE '2024-03-01'
d + INTERVAL '1' MONTH = DATE '2024-03-29'
d BETWEEN DATE '1969-12-31' AND DATE '1970-01-01'
year(d) = 1969
month(d) = 12
day(d) = 31
quarter(d) = 1
year(ts) < 1970
extract(year FROM ts) = 2024
extract(dow FROM d) = 4
day_of_week(d) > 5
day_of_year(d) = 60
week(d) = 1
year_of_week(d) = 2020
last_day_of_month(d) = DATE '2024-02-29'
hour(ts) = 23
minute(ts) = 59
date_trunc('day', ts) = TIMESTAMP '2024-02-29 00:00:00'
date_trunc('hour', ts) < TIMESTAMP '1970-01-01 00:00:00'
date_trunc('month', d) = DATE '2024-02-01'
date_trunc('week', ts) = TIMESTAMP '2024-02-26 00:00:00'
date_trunc('quarter', d) >= DATE '2023-10-01'
date_trunc('year', tz) = TIMESTAMP '2024-01-01 00:00:00 UTC'
date_diff('day', d, DATE '2024-03-01') <= 1
date_diff('hour', ts, TIMESTAMP '1970-01-01 00:00:00') > 0
date_diff('month', d, DATE '2024-03-31') = 1
date_add('day', 1, d) = DATE '1970-01-01'
date_add('month', -1, d) < DATE '1970-01-01'
date_format(ts, '%Y-%m') = '2024-02'
date_format(ts, '%Y-%m-%d') >= '2024-02-29'
date_parse('2024-02-29', '%Y-%m-%d') < ts
from_iso8601_date('2024-02-29') = d
from_iso8601_timestamp('2024-03-10T00:00:00Z') < tz
from_unixtime(0) > tz
to_unixtime(ts) < 0
to_unixtime(tz) BETWEEN 0 AND 1e6
ts > TIMESTAMP '2024-02-29 00:00:00.0000005'
ts >= TIMESTAMP '1969-12-31 23:59:59.999999'
ts < TIMESTAMP '1970-01-01 00:00:00.000001'
ts = TIMESTAMP '1969-12-31 12:00:00.5'
ts > DATE '2024-02-29'
ts BETWEEN DATE '1969-12-31' AND TIMESTAMP '1970-01-01 06:00:00'
tz > TIMESTAMP '2024-03-10 00:00:00 America/New_York'
tz = TIMESTAMP '1970-01-10 00:00:00 +02:00'
tz AT TIME ZONE 'Asia/Tokyo' > TIMESTAMP '2024-03-10 00:00:00 UTC'
CAST(tz AS date) = DATE '2024-03-10'
tz BETWEEN TIMESTAMP '1970-01-09 00:00:00 UTC' AND TIMESTAMP '1970-01-11 00:00:00 UTC'
name = 'a'
name = 'a '
name < 'b'
name > 'z'
name <= ''
name BETWEEN 'A' AND 'a'
name LIKE 'a%'
name LIKE '%b'
name LIKE 'x\%y' ESCAPE '\'
name LIKE 'x__'
name LIKE 'x$_y' ESCAPE '$'
name LIKE 'Stra_e'
name NOT LIKE 'a%'
name LIKE ''
name LIKE '%'
name LIKE 'é'
name LIKE '𝒳%'
name LIKE name
lower(name) = 'abc'
upper(name) = 'STRASSE'
upper(name) = 'ABC'
length(name) = 2
length(name) > 5
trim(name) = 'a'
ltrim(name) = 'a'
rtrim(name) IN ('a', 'ab')
substr(name, 1, 2) = 'ab'
substr(name, -1) = 'b'
substring(name FROM 2) = 'bc'
starts_with(name, 'St')
strpos(name, 'b') = 2
position('y' IN name) > 0
replace(name, 'b', '') = 'a'
reverse(name) = 'cba'
name || 'x' = 'ax'
concat(name, 'q') = 'aq'
concat_ws('-', name, 'q') = 'a-q'
lpad(name, 3, '*') = '**a'
regexp_like(name, '^a')
regexp_like(name, '(?i)^ABC$')
regexp_extract(name, '[0-9]+') = '10'
regexp_replace(name, '[aä]', '') = 'b'
split_part(name, '_', 2) = 'y'
codepoint('a') = 97 AND name = 'a'
normalize(name, NFC) = 'é'
name IN ('a', 'ab') AND name > 'a'
name IS NULL OR k = 1
amt = 99.99
amt = 99.990
amt > 99.985
amt < 1e2
amt IN (0.00, 1e2)
amt BETWEEN 0.3 AND 1e2
amt * 2 = 200
amt / 3 > 33.33
amt + 0.01 = 100.00
amt - 0.01 < 0
round(amt) = 100
round(amt, 1) = 1234.5
floor(amt) = -251
ceiling(amt) = 0
truncate(amt) = 99
sign(amt) = -1
amt = REAL '1234.5'
amt * 1.19 > 100
-amt > 0
x > 1
x >= 1.5
x < 0
x = 0
x = -0.0
x <> x
x = x
x > infinity()
x >= infinity()
x < nan()
NOT x > 1
NOT x <= 1
NOT (x < 0 OR x > 1)
is_nan(x)
NOT is_nan(x)
is_finite(x)
is_infinite(x)
x IN (0.1, nan())
x NOT IN (0.1, 1.5)
x BETWEEN -1 AND 2
x NOT BETWEEN -1 AND 2
x IS DISTINCT FROM nan()
round(x) = 2
floor(x) = -3
x * 2 > 2
x + 1 = 1.1
1 / x > 0
sqrt(x) >= 1
x = 1000000000000000000
x > 999999999999999999
r = 0.1
r = REAL '0.1'
r > 0.1
r < DOUBLE '0.1'
CAST(r AS double) > 0.1
r = 16777217
r IN (2.5, 16777216)
r + x > 2
greatest(k, 2) = 2
least(k, id) < 0
greatest(x, 1e0) = 1e0
b
NOT b
b IS NULL
b = true
b <> false
b IS NOT TRUE AND id > 0
b AND k = 1 OR NOT b AND k = 2
cardinality(tags) = 1
element_at(tags, 2) IS NULL
contains(tags, 'a')
any_match(tags, t -> t = 'b')
tags = ARRAY['a']
element_at(m, 'a') = 1
cardinality(map_keys(m)) = 2
s.a = 1
s.a IS NULL
s.c = 'q'
s IS NULL
s.a > 0 AND s.c <> 'z'
bin = X'00'
bin > X'61'
bin = X''
length(bin) = 2
to_hex(bin) = 'FFFE'
bin IN (X'6162', X'FFFE')
u = UUID 'f79c3e09-677c-4bbd-a479-3f349cb785e7'
u < UUID '80000000-0000-0000-0000-000000000000'
u > UUID '80000000-0000-0000-0000-000000000001'
CAST(u AS varchar) LIKE 'f79%'
u IN (UUID '00000000-0000-0000-0000-000000000001', UUID '80000000-0000-0000-0000-000000000002')
id IN (SELECT k FROM {t} WHERE k > 1)
id NOT IN (SELECT k FROM {t} WHERE k > 1 AND k < 100)
k = (SELECT max(k) FROM {t} WHERE k < 10)
d = (SELECT max(d) FROM {t})
ts > (SELECT min(ts) FROM {t} WHERE name = 'ab')
x > ALL (SELECT x FROM {t} WHERE x < 1)
id = ANY (SELECT k FROM {t})
id > 1_000
id = 0x10
id = 0b11
k = +1
1 = 1 AND id = 3
1 = 0 OR id = 3
NULL OR id = 3
id = 3 AND NULL
