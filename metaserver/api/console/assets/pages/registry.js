// All pages. A new page is a module in this folder and an entry here: `id` is the first part of its address, `title`
// its name in the navigation, `view` its component, which receives the address. Tabs of a table are alike; their
// component receives the table as well.

import { Admin } from "./admin.js";
import { Advisor } from "./advisor.js";
import { Explain } from "./explain.js";
import { Health } from "./health.js";
import { History } from "./history.js";
import { Indexes } from "./indexes.js";
import { Layout } from "./layout.js";
import { Overview } from "./overview.js";
import { Query } from "./query.js";
import { Services } from "./services.js";
import { Sql } from "./sql.js";
import { Streams } from "./streams.js";
import { Table } from "./table.js";
import { Tables } from "./tables.js";
import { CatalogTimeline, TableTimeline } from "./timeline.js";

export const TABS = [
  { id: "overview", title: "Overview", view: Overview },
  { id: "layout", title: "Layout", view: Layout },
  { id: "explain", title: "Explain", view: Explain },
  { id: "indexes", title: "Indexes", view: Indexes },
  { id: "history", title: "History", view: History },
  { id: "advisor", title: "Advisor", view: Advisor },
  { id: "timeline", title: "Timeline", view: TableTimeline },
  { id: "health", title: "Health", view: Health },
];

export const PAGES = [
  { id: "tables", title: "Tables", view: Tables },
  { id: "sql", title: "SQL", view: Sql },
  { id: "query", title: "Plans", view: Query },
  { id: "timeline", title: "Timeline", view: CatalogTimeline },
  { id: "services", title: "Services", view: Services },
  { id: "streams", title: "Streams", view: Streams },
  { id: "admin", title: "Access", view: Admin },
  { id: "table", within: "tables", titleOf: ({ parts }) => parts[2] ?? "Table", view: (given) => Table({ ...given, tabs: TABS }) },
];
