-- TPC-H (views region, nation, supplier, customer, part, orders, lineitem) to SSB, in DuckDB's SQL.
-- Variables: customers, suppliers, parts = rows of each dimension at this scale. What differs from dbgen: generate.py.

CREATE MACRO spread(key, buckets) AS  -- a key to 0 … buckets-1, evenly and the same on every machine (Knuth's hash)
    ((key * 2654435761) % 4294967296) * buckets // 4294967296;
CREATE MACRO cents(amount) AS CAST(amount * 100 AS INTEGER);
CREATE MACRO datekey(day) AS CAST(strftime(day, '%Y%m%d') AS INTEGER);
CREATE MACRO city(nation, key) AS rpad(substr(nation, 1, 9), 9, ' ') || spread(key, 10);

CREATE VIEW ssb_customer AS
SELECT CAST(c_custkey AS INTEGER) AS c_custkey, c_name, c_address, city(n_name, c_custkey) AS c_city,
       n_name AS c_nation, r_name AS c_region, c_phone, c_mktsegment
FROM customer JOIN nation ON c_nationkey = n_nationkey JOIN region ON n_regionkey = r_regionkey
WHERE c_custkey <= getvariable('customers')
ORDER BY c_custkey;

CREATE VIEW ssb_supplier AS
SELECT CAST(s_suppkey AS INTEGER) AS s_suppkey, s_name, s_address, city(n_name, s_suppkey) AS s_city,
       n_name AS s_nation, r_name AS s_region, s_phone
FROM supplier JOIN nation ON s_nationkey = n_nationkey JOIN region ON n_regionkey = r_regionkey
WHERE s_suppkey <= getvariable('suppliers')
ORDER BY s_suppkey;

CREATE VIEW ssb_part AS
SELECT CAST(p_partkey AS INTEGER) AS p_partkey,
       split_part(p_name, ' ', 2) || ' ' || split_part(p_name, ' ', 3) AS p_name,
       'MFGR#' || right(p_mfgr, 1) AS p_mfgr,
       'MFGR#' || right(p_brand, 2) AS p_category,
       'MFGR#' || right(p_brand, 2) || (spread(p_partkey, 40) + 1) AS p_brand1,
       split_part(p_name, ' ', 1) AS p_color, p_type, p_size, p_container
FROM part
WHERE p_partkey <= getvariable('parts')
ORDER BY p_partkey;

CREATE VIEW ssb_date AS
SELECT datekey(day) AS d_datekey,
       strftime(day, '%B %-d, %Y') AS d_date,
       dayname(day) AS d_dayofweek,
       monthname(day) AS d_month,
       CAST(year(day) AS INTEGER) AS d_year,
       CAST(strftime(day, '%Y%m') AS INTEGER) AS d_yearmonthnum,
       strftime(day, '%b%Y') AS d_yearmonth,
       CAST(dayofweek(day) + 1 AS INTEGER) AS d_daynuminweek,
       CAST(day(day) AS INTEGER) AS d_daynuminmonth,
       CAST(dayofyear(day) AS INTEGER) AS d_daynuminyear,
       CAST(month(day) AS INTEGER) AS d_monthnuminyear,
       CAST((dayofyear(day) - 1) // 7 + 1 AS INTEGER) AS d_weeknuminyear,
       CASE WHEN month(day) >= 11 THEN 'Christmas' WHEN month(day) >= 9 THEN 'Fall' WHEN month(day) >= 5 THEN 'Summer'
            WHEN month(day) = 4 THEN 'Spring' ELSE 'Winter' END AS d_sellingseason,
       CAST(dayofweek(day) = 6 AS INTEGER) AS d_lastdayinweekfl,
       CAST(day = last_day(day) AS INTEGER) AS d_lastdayinmonthfl,
       CAST(strftime(day, '%m%d') IN ('0101', '0220', '0420', '0520', '0720', '0820', '0920', '1020', '1120', '1224')
            AS INTEGER) AS d_holidayfl,
       CAST(dayofweek(day) BETWEEN 1 AND 5 AS INTEGER) AS d_weekdayfl
FROM (SELECT CAST(unnest(generate_series(DATE '1992-01-01', DATE '1998-12-31', INTERVAL 1 DAY)) AS DATE) AS day)
ORDER BY d_datekey;

CREATE VIEW ssb_lineorder AS
SELECT l_orderkey AS lo_orderkey,
       CAST(l_linenumber AS INTEGER) AS lo_linenumber,
       CAST((o_custkey - 1) % getvariable('customers') + 1 AS INTEGER) AS lo_custkey,
       CAST((l_partkey - 1) % getvariable('parts') + 1 AS INTEGER) AS lo_partkey,
       CAST((l_suppkey - 1) % getvariable('suppliers') + 1 AS INTEGER) AS lo_suppkey,
       datekey(o_orderdate) AS lo_orderdate,
       o_orderpriority AS lo_orderpriority,
       CAST(o_shippriority AS INTEGER) AS lo_shippriority,
       CAST(l_quantity AS INTEGER) AS lo_quantity,
       cents(l_extendedprice) AS lo_extendedprice,
       cents(o_totalprice) AS lo_ordtotalprice,
       cents(l_discount) AS lo_discount,
       CAST(cents(l_extendedprice)::BIGINT * (100 - cents(l_discount)) // 100 AS INTEGER) AS lo_revenue,
       CAST(cents(l_extendedprice)::BIGINT * 6 // (CAST(l_quantity AS INTEGER) * 10) AS INTEGER) AS lo_supplycost,
       cents(l_tax) AS lo_tax,
       datekey(l_commitdate) AS lo_commitdate,
       l_shipmode AS lo_shipmode
FROM lineitem JOIN orders ON l_orderkey = o_orderkey
ORDER BY lo_orderdate, lo_orderkey, lo_linenumber;
